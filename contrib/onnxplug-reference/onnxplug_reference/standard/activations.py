"""Activations that onnx's evaluator has no kernel of, or computes without regard to large numbers."""

from __future__ import annotations

import numpy as np

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import erf, typed


def gelu(x: np.ndarray, *, approximate: str = "none") -> np.ndarray:
    """x times the normal distribution function, or its approximation by tanh."""
    wide = x.astype(np.float64)
    if approximate == "tanh":
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        return typed(0.5 * wide * (1 + np.tanh(inner)), x)
    return typed(0.5 * wide * (1 + erf(wide / np.sqrt(2))), x)


KERNELS = [
    Kernel("Gelu", gelu, since=20),
]
