"""Operators of ai.onnx that onnx's evaluator lacks, computes in part, or computes far more slowly."""

from __future__ import annotations

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.standard import normalization, planes, pools, recurrent, reductions, rest, softmax

KERNELS: list[Kernel] = [
    *normalization.KERNELS,
    *planes.KERNELS,
    *pools.KERNELS,
    *recurrent.KERNELS,
    *reductions.KERNELS,
    *rest.KERNELS,
    *softmax.KERNELS,
]
