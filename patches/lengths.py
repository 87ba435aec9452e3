"""``len(tensor)`` during capture: Python requires a plain number, which makes a dynamic size a constant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from onnxplug.capture.mentions import Mentions, code_names
from onnxplug.capture.patching import patched

_python_length = len  # by another name: in an export within an export, this module is the model's code too


def _length(item: Any) -> Any:
    """As Python's ``len``, but for a tensor whose first size is dynamic this size."""
    if isinstance(item, torch.Tensor) and item.dim() and isinstance(item.shape[0], torch.SymInt):
        return item.shape[0]
    return _python_length(item)


class Globals:
    """A function's globals, as an object whose attributes they are."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.__dict__ = namespace


@contextlib.contextmanager
def lengths_stay_dynamic(mentions: Mentions) -> Iterator[None]:
    """While it holds, ``len`` of a tensor is its first size in the Python modules of the model's own code."""
    named = {id(f.__globals__): f.__globals__ for f in mentions.functions if "len" in code_names(f.__code__)}
    with contextlib.ExitStack() as stack:
        for namespace in named.values():
            if "len" not in namespace:
                stack.enter_context(patched(Globals(namespace), "len", _length))
        yield
