"""Normalisations for which onnx's evaluator has no kernel."""

from __future__ import annotations

import numpy as np

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import typed


def batch_normalization(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[np.ndarray, ...]:
    """Normalises channels, axis 1, by the running statistics, or in training by their own, which update the running."""
    axes = tuple(i for i in range(x.ndim) if i != 1)
    form = (1, -1, *[1] * (x.ndim - 2)) if x.ndim > 1 else (-1,)
    wide = x.astype(np.float64)
    used_mean, used_var = (wide.mean(axes), wide.var(axes)) if training_mode else (mean, var)
    factor = scale.astype(np.float64) / np.sqrt(used_var.astype(np.float64) + epsilon)
    result = typed((wide - used_mean.reshape(form)) * factor.reshape(form) + bias.reshape(form), x)
    if not training_mode:
        return (result,)
    pairs = ((mean, used_mean), (var, used_var))
    return result, *(typed(old * momentum + new * (1 - momentum), old) for old, new in pairs)


def batch_normalization_7(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    outputs: int,
    spatial: int = 1,
) -> tuple[np.ndarray, ...]:
    """BatchNormalization before opset 14: several outputs mean training; not spatial: each element has statistics."""
    training = int(outputs > 1)
    if not spatial:
        flat = x.reshape(x.shape[0], -1)
        parameters = [p.reshape(-1) for p in (scale, bias, mean, var)]
        result, *running = batch_normalization(
            flat, *parameters, epsilon=epsilon, momentum=momentum, training_mode=training
        )
        return result.reshape(x.shape), *(r.reshape(mean.shape) for r in running)
    results = batch_normalization(x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum, training_mode=training)
    axes = tuple(i for i in range(x.ndim) if i != 1)
    wide = x.astype(np.float64)
    return *results, typed(wide.mean(axes), mean), typed(wide.var(axes), var)


def lrn(x: np.ndarray, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int) -> np.ndarray:
    """Each element divided by a power of the mean square of its neighbours along the channels, axis 1."""
    squares = np.zeros((x.shape[0], x.shape[1] + size - 1, *x.shape[2:]))
    before = (size - 1) // 2
    squares[:, before : before + x.shape[1]] = x.astype(np.float64) ** 2
    sums = np.zeros(x.shape)
    for shift in range(size):
        sums += squares[:, shift : shift + x.shape[1]]
    return typed(x / (bias + alpha / size * sums) ** beta, x)


def lp_normalization(x: np.ndarray, *, axis: int = -1, p: int = 2) -> np.ndarray:
    """x divided by its norm along an axis; 0 where the norm is 0."""
    wide = x.astype(np.float64)
    norm = (np.abs(wide) ** p).sum(axis, keepdims=True) ** (1 / p)
    return typed(np.divide(wide, norm, out=np.zeros_like(wide), where=norm != 0), x)


KERNELS = [
    Kernel("LRN", lrn),
    Kernel("LpNormalization", lp_normalization),
    Kernel("BatchNormalization", batch_normalization_7, since=7),
    Kernel("BatchNormalization", batch_normalization, since=14),
]
