"""``torch.onnx.is_in_onnx_export()`` during capture: models branch on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from onnxplug.capture.patching import patched


def onnx_export_flag() -> AbstractContextManager[None]:
    """While it holds, ``torch.onnx.is_in_onnx_export()`` is true, as it is in ``torch.onnx.export``.

    The flag is the process's, as torch's own is.
    """
    from onnxplug.torch_private import onnx_export_flags

    if not hasattr(onnx_export_flags, "_is_onnx_exporting"):  # later versions of torch keep it elsewhere
        return contextlib.nullcontext()
    return patched(onnx_export_flags, "_is_onnx_exporting", True)


@contextlib.contextmanager
def onnx_export_flag_in_dynamo() -> Iterator[None]:
    """The same for torch.export's strict mode: dynamo takes the function for the constant ``False``."""
    from onnxplug.torch_private import tracing_state_functions

    answers: dict[Any, Any] = tracing_state_functions()
    before = answers.get(torch.onnx.is_in_onnx_export)
    answers[torch.onnx.is_in_onnx_export] = True
    try:
        yield
    finally:
        answers[torch.onnx.is_in_onnx_export] = before
