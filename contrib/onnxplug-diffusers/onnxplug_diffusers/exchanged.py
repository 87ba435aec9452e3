"""Methods of diffusers' classes exchanged for others while a model is captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onnxplug.capture.patching import patched


@contextmanager
def exchanged(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Holds while a model is captured. A method with other parameters, of another version of diffusers, is left as it is.

    Args:
        owner: The class.
        name: The name of its method.
        make: Makes, of diffusers' method, the function that is called instead.
    """
    before = getattr(owner, name, None)
    after = make(before) if callable(before) else None
    if before is None or after is None or _parameters(before) != _parameters(after):
        yield
        return
    with patched(owner, name, after):
        yield


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
