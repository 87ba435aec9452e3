"""The receivers of the stages' names: a function of the caller's, or the display of ``onnxplug_tools.progress``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.observers import STAGES, Observer, Span, events
from onnxplug.packages import is_installed, load

Show = Callable[[str], Any]


class Display(Observer):
    """Receives the name of the running stage as it begins. This one shows nothing."""

    stays = False

    def __call__(self, stage: str) -> None:
        """A stage begins."""

    def part(self, done: int, total: int) -> None:
        """Shows the bytes that the stage has done, and the bytes of the whole."""


class StageNames(Observer):
    """Calls a function with the name of each stage of an export as it begins."""

    stays = False

    def __init__(self, show: Show) -> None:
        self._show = show

    def begin(self, span: Span) -> None:
        """Calls the function, where it is a stage and no part of one."""
        if span.kind == "stage" and span.name in STAGES:
            self._show(span.name)


def shown() -> Display | None:
    """The display of this thread's stages; ``None`` where there is none."""
    return events().find(Display)


@contextlib.contextmanager
def showing(progress: Any) -> Iterator[Show | None]:
    """The function that is called with the stages' names, for an argument ``progress=``.

    Args:
        progress: ``True`` for a spinner on a terminal; a function of a stage's name; ``False`` or ``None`` for nobody.

    Raises:
        UsageError: It is anything else.
        MissingPackageError: The package that shows them is not installed.
    """
    if progress is None or progress is False:
        yield None
    elif callable(progress):
        yield progress
    elif progress is not True:
        raise UsageError(f"progress takes True, False or a function of the name of a stage, got {progress!r}")
    elif (display := shown()) is not None:
        yield display
    else:
        with load("progress=").displayed() as display:
            yield display


@contextlib.contextmanager
def reporting(progress: Any) -> Iterator[Callable[[int, int], Any] | None]:
    """The function that is called with the written bytes and the bytes of the whole, for an argument ``progress=``.

    Args:
        progress: ``True`` or ``False``, for a bar on standard error or none; a function; ``None`` for a bar where there is much to
            write.

    Raises:
        UsageError: It is anything else.
        MissingPackageError: The package that shows a bar is not installed.
    """
    if callable(progress):
        yield progress
    elif not isinstance(progress, bool | None):
        raise UsageError(f"progress= takes True, False or a function of two numbers, got {progress!r}")
    elif progress or is_installed("progress="):
        with load("progress=").reporting(progress) as part:
            yield part
    else:
        yield None
