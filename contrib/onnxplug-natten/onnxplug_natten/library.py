"""natten's functions exchanged for ATen operators that compute them, in a capture."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from onnxplug.capture.patching import patched
from onnxplug_natten import attention

#: Functions of ``natten.functional``, with those that take their place.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neighborhood_attention_generic": attention.neighborhood_attention_generic,
    "attention": attention.attention,
}


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Holds while a model is captured: the functions are exchanged wherever a module has them."""
    with contextlib.ExitStack() as stack:
        for module, name, function in _places():
            stack.enter_context(patched(module, name, function))
        yield


def _places() -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """Each module, of anyone, that has a function of the table. One with other parameters, of another version, stays."""
    for name, function in FUNCTIONS.items():
        theirs = getattr(sys.modules.get("natten.functional"), name, None)
        if theirs is None or _parameters(theirs) != _parameters(function):
            continue
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get(name) is theirs:
                yield module, name, function


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
