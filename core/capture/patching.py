"""Replaces attributes while a context holds, and restores them."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

from onnxplug.plugin_api import AttemptPatch, CaptureMode, CaptureRequest, Patch

_ABSENT: Any = object()
#: Held while torch is patched, for the whole process; torch.export patches some itself, and captures one model at a time.
ONE_AT_A_TIME = threading.RLock()

#: The changes that patches make to the code of the model's functions while they hold.
CODE_CHANGES: list[Callable[[CodeType], CodeType]] = []


def made_by(
    patch: Patch, module: Any, request: CaptureRequest
) -> contextlib.AbstractContextManager[Any] | Sequence[CaptureMode]:
    """A patch's contexts for a capture: the result of its function of module and request, or of fewer; or the patch itself."""
    if isinstance(patch, contextlib.AbstractContextManager):
        return patch
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(patch).parameters.values()
    count = sum(p.kind in places and p.default is inspect.Parameter.empty for p in parameters)
    return patch(*(module, request)[:count])


def is_of_attempt(patch: Patch) -> bool:
    """Whether a patch, or the patch that the plugin host wraps, holds for an attempt."""
    return isinstance(getattr(patch, "patch", patch), AttemptPatch)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object, class or module another attribute while the context holds.

    An attribute that ``owner`` inherits, or doesn't have, is deleted from it afterwards.
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
