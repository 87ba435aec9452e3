"""The running stage on a terminal: its name, its progress, and the seconds that it has taken.

Nothing is shown where standard error is no terminal.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from onnxplug import progress
from onnxplug.observers import observed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

#: Stages that took longer, in seconds, stay on the screen with their time.
WORTH_A_LINE = 1.0

#: Bytes to write from which on a bar is shown by default.
_WORTH_A_BAR = 1_000_000_000


class Display(progress.Display):
    """Shows the running stage; called with its name as it begins."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stage: str | None = None
        self._started = time.perf_counter()

    def __call__(self, stage: str) -> None:
        self.finish()
        self._stage, self._started = stage, time.perf_counter()
        self._bar.add_task(f"{stage} ...", total=None)
        self._bar.refresh()

    def step(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows the present step of the stage.

        Args:
            done, total: The progress of the stage, where it is known.
        """
        self._update(text, done, total, refresh=True)

    def _update(self, text: str, done: int | None, total: int | None, refresh: bool) -> None:
        if self._bar.task_ids:
            description = f"{self._stage}: {text} ..."
            self._bar.update(
                self._bar.task_ids[-1], description=description, completed=done, total=total, refresh=refresh
            )

    def part(self, done: int, total: int) -> None:
        """Shows the bytes that the stage has done, and the bytes of the whole."""
        from rich import filesize

        self._update(f"{filesize.decimal(done)} of {filesize.decimal(total)}", done, total, refresh=False)

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the stage; a stage that took long leaves a line."""
        seconds = time.perf_counter() - self._started
        from rich.errors import LiveError

        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        if self._stage is not None and seconds > WORTH_A_LINE:
            with contextlib.suppress(LiveError):
                self._bar.console.print(f"{self._stage}: {seconds:.1f} s", markup=False, highlight=False)
        self._stage = None


@contextlib.contextmanager
def displayed(console: Console | None = None) -> Iterator[progress.Display]:
    """A spinner with the stage and its seconds while the context lasts; nothing where the console is no terminal.

    Args:
        console: The console; standard error by default.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True) if console is None else console
    if not console.is_terminal or sys.stderr is None:
        yield progress.Display()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with _on_one_stream(console), Progress(*columns, console=console, transient=True) as bar:
        display = Display(bar)
        with observed(display):
            yield display


@contextlib.contextmanager
def _on_one_stream(console: Console) -> Iterator[None]:
    """Keeps a console on the present standard error: capture redirects it, and the spinner would stop."""
    before = vars(console).get("_file")
    console.file = console.file
    try:
        yield
    finally:
        console.file = before  # type: ignore[assignment]


@contextlib.contextmanager
def reporting(wanted: bool | None) -> Iterator[Callable[[int, int], Any] | None]:
    """The function that is called with the written bytes and the bytes of the whole; ``None`` for ``wanted=False``.

    Args:
        wanted: Whether there is a bar; ``None`` for a bar where there is much to write. A display of the stage shows
            the progress itself.
    """
    display = progress.shown()
    with contextlib.ExitStack() as stack:

        def part(done: int, total: int) -> None:
            nonlocal display
            if display is None and (wanted or total >= _WORTH_A_BAR):
                display = stack.enter_context(displayed())
                display("saving")
            if display is not None:
                display.part(done, total)

        yield None if wanted is False else part
