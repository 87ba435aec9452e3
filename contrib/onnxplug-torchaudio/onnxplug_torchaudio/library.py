"""torchaudio's functions that its compiled extension computes, exchanged in a capture."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from onnxplug.capture.patching import patched
from onnxplug_torchaudio import alignment, filters

_FILTERING = "torchaudio.functional.filtering"
#: Functions of torchaudio, by module and name, with those that take their place.
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (_FILTERING, "_lfilter_core_loop"): filters.lfilter_core_loop,
    (_FILTERING, "_overdrive_core_loop_cpu"): filters.overdrive_core_loop,
    (_FILTERING, "_overdrive_core_loop_generic"): filters.overdrive_core_loop,
    ("torchaudio.functional._alignment", "forced_align"): alignment.forced_align,
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
    for (path, name), function in FUNCTIONS.items():
        theirs = getattr(sys.modules.get(path), name, None)
        if theirs is None or _parameters(theirs) != _parameters(function):
            continue
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get(name) is theirs:
                yield module, name, function


def _parameters(function: Callable[..., Any]) -> int:
    """How many; the extension's operators name theirs otherwise than the functions in Python."""
    schema = getattr(getattr(function, "default", None), "_schema", None)
    return len(inspect.signature(function).parameters if schema is None else schema.arguments)
