"""Operators of ai.onnx that onnx's evaluator lacks, or computes by less than the specification: a module a family."""

from __future__ import annotations

from onnxplug.reference.kernels import Kernel

KERNELS: list[Kernel] = []
