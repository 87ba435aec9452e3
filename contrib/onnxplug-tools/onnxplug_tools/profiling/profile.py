"""The profile of an export."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnxplug_tools.profiling.sums import Sums

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_LONGEST_TABLE = 20


class Profile(Sums):
    """Where the time of an export went. ``print`` shows it as tables, :meth:`save` writes it for Perfetto and speedscope.

    Later calls of :meth:`OnnxProgram.save` and :meth:`OnnxProgram.verify` are added to the program's profile.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it in Chrome's trace format: https://ui.perfetto.dev, https://www.speedscope.app and chrome://tracing show it.

        Args:
            path: The file; an existing file is replaced, completely or not at all.

        Raises:
            SaveError: It can't be written.
            UsageError: It is no path.
        """
        from onnxplug_tools.profiling.chrome import save_trace

        save_trace(self, path)

    def text(self, rows: int = _LONGEST_TABLE) -> str:
        """The tables as text.

        Args:
            rows: The number of rows that are shown of each table, the most expensive rows.
        """
        from onnxplug_tools.profiling.tables import plain_text

        return plain_text(self, rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Profile of {self.seconds:.2f} s: {len(self.spans)} spans>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from onnxplug_tools.profiling.tables import tables

        yield from tables(self, _LONGEST_TABLE)
