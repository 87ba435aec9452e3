"""What torch.export does while it traces, and nobody reads, is left out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from onnxplug.capture.patching import patched
from onnxplug.torch_private import ModuleStackTracer, use_lazy_graph_module

#: Held while classes of torch and of the model are patched; torch.export patches some itself, and takes one model at a time.
ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def lean_tracing() -> Iterator[None]:
    """While it holds, graphs between torch.export's passes are not made Python code, and inputs get no lines of code.

    The tracer looks for the model's lines on the stack for each parameter too, before any of the model's code runs.
    """
    with ONE_AT_A_TIME:
        original = ModuleStackTracer.create_node

        def create_node(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
            if kind != "placeholder":
                return original(tracer, kind, *args, **kwargs)
            with patched(tracer, "record_stack_traces", False):
                return original(tracer, kind, *args, **kwargs)

        with patched(ModuleStackTracer, "create_node", create_node), use_lazy_graph_module(True):
            yield
