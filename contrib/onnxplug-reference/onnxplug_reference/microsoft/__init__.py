"""Operators of com.microsoft that our rewrites and ONNX Runtime's transformer optimizer emit.

They follow ONNX Runtime's documentation of its operators, and its CPU kernels where the documentation leaves a case
open.
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
