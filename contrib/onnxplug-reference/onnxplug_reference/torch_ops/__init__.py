"""Kernels that call PyTorch's operators: layers, and operators that move and reduce elements between them.

NumPy computes other operators; a kernel that raises ``NotImplementedError`` leaves the case to NumPy.
"""

from __future__ import annotations

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.torch_ops import elementwise, networks, reductions, shapes

KERNELS: list[Kernel] = [*elementwise.KERNELS, *networks.KERNELS, *reductions.KERNELS, *shapes.KERNELS]
