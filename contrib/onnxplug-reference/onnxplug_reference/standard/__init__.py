"""Operators of ai.onnx that onnx's evaluator lacks, or computes by less than the specification: a module a family."""

from __future__ import annotations

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.standard import (
    activations,
    normalization,
    optionals,
    planes,
    pools,
    random,
    recurrent,
    rest,
    softmax,
)

KERNELS: list[Kernel] = [
    *activations.KERNELS,
    *normalization.KERNELS,
    *optionals.KERNELS,
    *planes.KERNELS,
    *pools.KERNELS,
    *random.KERNELS,
    *recurrent.KERNELS,
    *rest.KERNELS,
    *softmax.KERNELS,
]
