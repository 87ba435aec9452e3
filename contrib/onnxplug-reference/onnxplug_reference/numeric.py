"""Functions that several kernels share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def typed(result: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A result in the dtype of an input."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(result).astype(like.dtype)


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, in float64."""
    return _erf(x) if x.size else x.astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), np.where(np.isnan(x), x, small / (1 + small)))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(x, np.zeros((), x.dtype))


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def gelu(x: np.ndarray, *, approximate: str = "none") -> np.ndarray:
    """x times the normal distribution function, or its approximation by tanh."""
    wide = x.astype(np.float64)
    if approximate == "tanh":
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        return typed(0.5 * wide * (1 + np.tanh(inner)), x)
    return typed(0.5 * wide * (1 + erf(wide / np.sqrt(2))), x)


def normalized(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x - mean over its deviation, the mean, and 1 over the deviation, along axes that are kept."""
    mean = x.mean(axes, keepdims=True)
    centred = x - mean
    scale = 1 / np.sqrt((centred * centred).mean(axes, keepdims=True) + epsilon)
    return centred * scale, mean, scale


def sizes(values: Any) -> list[int]:
    """A one-dimensional tensor of sizes as Python ints."""
    return [int(v) for v in np.asarray(values).reshape(-1)]


def sliced(start: int, end: int, step: int, size: int) -> range:
    """The indices of a slice of an axis; with a negative step, a start before the first element is the first element."""
    if step > 0:
        return range(*slice(start, end, step).indices(size))
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    last = max(end + size if end < 0 else end, -1)
    return range(first, last, step)
