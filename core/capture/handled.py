"""Errors of torch's functions that the model's code handles: in PyTorch they have to be the same.

``try: x.numpy() except RuntimeError: …`` takes another way while a model is captured than it takes in PyTorch, without a word.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode

from onnxplug.capture.patching import patched
from onnxplug.capture.questions import place_of
from onnxplug.errors import CaptureError
from onnxplug.torch_private import NonStrictFunctions

#: The lines of the model where calls of torch's functions raised, and the errors.
Errors = list[tuple[str | None, Exception]]


@contextlib.contextmanager
def errors_kept() -> Iterator[Errors]:
    """Keeps the errors of torch's functions that a capture in the non-strict mode meets, with the user's lines."""
    errors: Errors = []

    original = getattr(NonStrictFunctions, "__torch_function__", None)
    if original is None:  # another torch
        yield errors
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            errors.append((place_of(sys._getframe(1)), error))
            raise

    with patched(NonStrictFunctions, "__torch_function__", call):
        yield errors


class _Eager(TorchFunctionMode):
    """Keeps the errors of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: Errors = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **kwargs or {})
        except Exception as error:
            self.errors.append((place_of(sys._getframe(1)), error))
            raise


def check_handled(errors: Errors, run: Callable[[], Any]) -> None:
    """Refuses a capture in which the model handled errors that it does not meet in PyTorch.

    Args:
        errors: The capture's.
        run: Runs the model eagerly on the example inputs.

    Raises:
        CaptureError: There are others.
    """
    if not errors:
        return
    eager = _Eager()
    with eager:
        run()
    left = [place for place, _ in eager.errors]
    for place, error in errors:
        if place in left:
            left.remove(place)
            continue
        raise CaptureError(
            f"the model handles an error at {place} that PyTorch does not raise there, but torch.export does: {error}",
            hint="Do without the call, or export the model without the `try`.",
        ) from error
