"""Operators of com.microsoft that rewrites emit, ours and those of ONNX Runtime's transformer optimizer.

They follow ONNX Runtime's documentation of its operators, and its CPU kernels where that leaves something open.
"""

from __future__ import annotations

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.microsoft import activations, attention, experts, grouped, norms, products

KERNELS: list[Kernel] = [
    *activations.KERNELS,
    *attention.KERNELS,
    *experts.KERNELS,
    *grouped.KERNELS,
    *norms.KERNELS,
    *products.KERNELS,
]
