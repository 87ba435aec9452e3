"""Verification of a program, after which the user's model is what it was: PyTorch's runs may change its attributes."""

from __future__ import annotations

import contextlib

import torch

from onnxplug.patches.unchanged import unchanged
from onnxplug.plugin_api import VerificationReport, VerificationRequest
from onnxplug.program import OnnxProgram
from onnxplug.verification import verify as comparison


def verify(program: OnnxProgram, request: VerificationRequest) -> VerificationReport:
    """As :func:`onnxplug.verification.verify.verify`, on a model that goes from run to run as its code changes it."""
    model = program.captured.reference if program.captured is not None else None
    is_python = isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule)
    with unchanged(model, alone=True) if is_python else contextlib.nullcontext():  # type: ignore[arg-type]
        return comparison.verify(program, request)
