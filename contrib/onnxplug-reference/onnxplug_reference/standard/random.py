"""Random numbers. A seed is a float; equal seeds give equal numbers, other than those of any runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from onnxplug_reference.kernels import Kernel

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
_FLOAT = onnx.TensorProto.FLOAT


def _generator(seed: float | None) -> np.random.Generator:
    return np.random.default_rng(None if seed is None else int(np.float32(seed).view(np.uint32)))


def _dtype(number: int) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(number)


def random_normal(
    *, dtype: int = _FLOAT, mean: float = 0.0, scale: float = 1.0, seed: float | None = None, shape: Sequence[int]
) -> np.ndarray:
    """Normally distributed numbers."""
    return _generator(seed).normal(mean, scale, tuple(shape)).astype(_dtype(dtype))


def random_uniform(
    *, dtype: int = _FLOAT, low: float = 0.0, high: float = 1.0, seed: float | None = None, shape: Sequence[int]
) -> np.ndarray:
    """Uniformly distributed numbers."""
    return _generator(seed).uniform(low, high, tuple(shape)).astype(_dtype(dtype))


def random_normal_like(
    x: np.ndarray, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> np.ndarray:
    """Normally distributed numbers of a tensor's shape, and of its dtype when none is given."""
    kind = x.dtype if dtype is None else _dtype(dtype)
    return np.asarray(_generator(seed).normal(mean, scale, x.shape)).astype(kind)


def random_uniform_like(
    x: np.ndarray, *, dtype: int | None = None, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> np.ndarray:
    """Uniformly distributed numbers of a tensor's shape, and of its dtype when none is given."""
    kind = x.dtype if dtype is None else _dtype(dtype)
    return np.asarray(_generator(seed).uniform(low, high, x.shape)).astype(kind)


def bernoulli(x: np.ndarray, *, dtype: int | None = None, seed: float | None = None) -> np.ndarray:
    """1 with the probability that each element is, else 0."""
    drawn = np.asarray(_generator(seed).uniform(0, 1, x.shape)) < x.astype(np.float64)
    return drawn.astype(x.dtype if dtype is None else _dtype(dtype))


def multinomial(
    x: np.ndarray, *, dtype: int = onnx.TensorProto.INT32, sample_size: int = 1, seed: float | None = None
) -> np.ndarray:
    """Class numbers drawn by unnormalised logarithms of probabilities, [batch, classes], to [batch, sample_size]."""
    noise = _generator(seed).gumbel(size=(x.shape[0], sample_size, x.shape[1]))
    return (x.astype(np.float64)[:, None, :] + noise).argmax(-1).astype(_dtype(dtype))


KERNELS = [
    Kernel("RandomNormal", random_normal, widen=False),
    Kernel("RandomUniform", random_uniform, widen=False),
    Kernel("RandomNormalLike", random_normal_like, widen=False),
    Kernel("RandomUniformLike", random_uniform_like, widen=False),
    Kernel("Bernoulli", bernoulli, since=15, widen=False),
    Kernel("Multinomial", multinomial, since=7, widen=False),
]
