"""``torch.onnx.is_in_onnx_export()`` during capture: models branch on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_lock = threading.Lock()
#: How many captures run in this process, and what the flag was before the first of them.
_running = 0
_before = False


@contextlib.contextmanager
def onnx_export_flag() -> Iterator[None]:
    """While it holds, ``torch.onnx.is_in_onnx_export()`` is true, as it is in ``torch.onnx.export``.

    The flag is one of the whole process, as torch's own is; it is put back when the last capture ends.
    """
    global _running, _before
    flags = _flags()
    if flags is None:
        yield
        return
    with _lock:
        if _running == 0:
            _before = flags._is_onnx_exporting
        _running += 1
        flags._is_onnx_exporting = True
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            flags._is_onnx_exporting = _before if _running == 0 else True


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


def _flags() -> Any:
    """torch's module that holds the flag; ``None`` where a later torch keeps it elsewhere."""
    from onnxplug.torch_private import onnx_export_flags

    return onnx_export_flags if hasattr(onnx_export_flags, "_is_onnx_exporting") else None
