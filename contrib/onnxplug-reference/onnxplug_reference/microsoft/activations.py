"""Activations of com.microsoft; a bias is along the last axis."""

from __future__ import annotations

import numpy as np

from onnxplug_reference.kernels import microsoft
from onnxplug_reference.numeric import gelu, sigmoid, typed


def bias_split_gelu(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The first half of the last axis of x + bias, times Gelu of the second half."""
    first, second = np.split(x + bias, 2, -1)
    return typed(first * gelu(second), x)


KERNELS = [
    microsoft("Gelu", lambda x: gelu(x)),
    microsoft("BiasGelu", lambda x, bias: gelu(x + bias)),
    microsoft("FastGelu", lambda x, bias=None: gelu(x if bias is None else x + bias, approximate="tanh")),
    microsoft("QuickGelu", lambda x, *, alpha=1.702: typed(x * sigmoid(np.float64(np.float32(alpha)) * x), x)),
    microsoft("BiasSplitGelu", bias_split_gelu),
]
