"""Activations that onnx's evaluator has no kernel of, or computes without regard to large numbers."""

from __future__ import annotations

import numpy as np

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import erf, sigmoid, softplus, typed


def gelu(x: np.ndarray, *, approximate: str = "none") -> np.ndarray:
    """x times the normal distribution function, or its approximation by tanh."""
    wide = x.astype(np.float64)
    if approximate == "tanh":
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        return typed(0.5 * wide * (1 + np.tanh(inner)), x)
    return typed(0.5 * wide * (1 + erf(wide / np.sqrt(2))), x)


def mish(x: np.ndarray) -> np.ndarray:
    """x tanh(softplus(x))."""
    wide = x.astype(np.float64)
    return typed(wide * np.tanh(softplus(wide)), x)


def hard_swish(x: np.ndarray) -> np.ndarray:
    """x max(0, min(1, x / 6 + 1 / 2))."""
    return typed(x * np.clip(x / 6 + 0.5, 0, 1), x)


def softplus_(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x))."""
    return typed(softplus(x), x)


def sigmoid_(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return typed(sigmoid(x), x)


KERNELS = [
    Kernel("Gelu", gelu, since=20),
    Kernel("Mish", mish, since=18),
    Kernel("HardSwish", hard_swish, since=14),
    Kernel("Softplus", softplus_),
    Kernel("Sigmoid", sigmoid_, since=6),
]
