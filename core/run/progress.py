"""How far the saving of a large model is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.progress import shown
from onnxplug.run.save import Progress

#: Bytes from which on a bar is shown without being asked for.
_WORTH_A_BAR = 1_000_000_000


@contextlib.contextmanager
def reporting(progress: Any) -> Iterator[Progress | None]:
    """What is told of the bytes that are written, for an argument ``progress=``.

    Args:
        progress: ``True`` or ``False``, for a bar on standard error or none; a function; ``None`` for a bar where there is much to
            write. There is none where standard error is no terminal, and where the stage is shown already, that says how far it is.

    Raises:
        UsageError: It is something else.
    """
    if callable(progress):
        yield progress
        return
    if not isinstance(progress, bool | None):
        raise UsageError(f"progress= takes True, False or a function of two numbers, got {progress!r}")
    if progress is not False and (display := shown()) is not None:
        yield display.part
        return
    if progress is False or not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(least=0 if progress else _WORTH_A_BAR)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    """A bar that is there from the first bytes on, if there are enough to come."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._shown: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._shown is None and total >= self._least:
            self._open(total)
        if self._task is not None:
            self._shown.update(self._task, completed=done)

    def _open(self, total: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.errors import LiveError

        columns = (
            progress.TextColumn("saving"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        self._shown = progress.Progress(*columns, console=Console(stderr=True))
        with contextlib.suppress(LiveError):  # the caller shows a bar of his own
            self._shown.start()
            self._task = self._shown.add_task("saving", total=total)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._task is not None:
            self._shown.stop()
