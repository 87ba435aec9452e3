"""The time that torch.export takes to trace each module of a model, for observers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from onnxplug.capture.patching import patched
from onnxplug.observers import events
from onnxplug.torch_private import ModuleStackTracer


@contextlib.contextmanager
def modules_timed() -> Iterator[None]:
    """While it holds, each module that torch.export traces in its non-strict mode is a span, where an observer wants details."""
    details = events().details
    if details is None:
        yield
        return
    original = ModuleStackTracer.call_module

    def call_module(
        tracer: Any, called: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module = called.get_base() if hasattr(type(called), "get_base") else called
        try:
            path = str(tracer.path_of_module(called)).removeprefix("_export_root").removeprefix(".")
        except Exception:  # a module outside of the model
            return original(tracer, called, forward, args, kwargs)
        if type(module).__module__.startswith("torch.export"):  # torch.export's wrapper of the model
            return original(tracer, called, forward, args, kwargs)
        with details.span(type(module).__name__, "module", path=path):
            return original(tracer, called, forward, args, kwargs)

    with patched(ModuleStackTracer, "call_module", call_module):
        yield
