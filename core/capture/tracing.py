"""What torch.export does while it traces, and nobody reads, is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from onnxplug.torch_private import ModuleStackTracer, use_lazy_graph_module


@contextlib.contextmanager
def lean_tracing() -> Iterator[None]:
    """While it holds, graphs between torch.export's passes are not made Python code, and inputs get no lines of code.

    The tracer looks for the model's lines on the stack for each parameter too, before any of the model's code runs.
    """
    original = ModuleStackTracer.create_node

    def create_node(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind != "placeholder":
            return original(tracer, kind, *args, **kwargs)
        recorded, tracer.record_stack_traces = tracer.record_stack_traces, False
        try:
            return original(tracer, kind, *args, **kwargs)
        finally:
            tracer.record_stack_traces = recorded

    ModuleStackTracer.create_node = create_node
    try:
        with use_lazy_graph_module(True):
            yield
    finally:
        ModuleStackTracer.create_node = original
