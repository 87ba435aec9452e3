"""Operators of ONNX by PyTorch's: functions of tensors, a module a family, in tables."""

from __future__ import annotations

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.torch_ops import elementwise, layers, microsoft, networks, reductions, sequences, shapes

KERNELS: list[Kernel] = [
    *elementwise.KERNELS,
    *layers.KERNELS,
    *microsoft.KERNELS,
    *networks.KERNELS,
    *reductions.KERNELS,
    *sequences.KERNELS,
    *shapes.KERNELS,
]
