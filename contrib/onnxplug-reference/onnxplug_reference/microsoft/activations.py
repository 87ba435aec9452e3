"""Activations of com.microsoft."""

from __future__ import annotations

import numpy as np

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import sigmoid, typed
from onnxplug_reference.standard.activations import gelu


def gelu_(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution function."""
    return gelu(x)


def bias_gelu(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Gelu of x + bias; bias is [C], of the last axis."""
    return gelu(x + bias)


def fast_gelu(x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Gelu's approximation by tanh, of x + bias."""
    return gelu(x if bias is None else x + bias, approximate="tanh")


def quick_gelu(x: np.ndarray, *, alpha: float = 1.702) -> np.ndarray:
    """x sigmoid(alpha x)."""
    return typed(x * sigmoid(np.float64(np.float32(alpha)) * x), x)


def bias_split_gelu(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The first half of the last axis of x + bias, times Gelu of the second half."""
    first, second = np.split(x + bias, 2, -1)
    return typed(first * gelu(second), x)


def _kernel(op: str, function: object) -> Kernel:
    return Kernel(op, function, domain="com.microsoft")  # type: ignore[arg-type]


KERNELS = [
    _kernel("Gelu", gelu_),
    _kernel("BiasGelu", bias_gelu),
    _kernel("FastGelu", fast_gelu),
    _kernel("QuickGelu", quick_gelu),
    _kernel("BiasSplitGelu", bias_split_gelu),
]
