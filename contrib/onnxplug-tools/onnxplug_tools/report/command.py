"""``--report DIR`` of commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from onnxplug.cli.report import err, note
from onnxplug.observers import observed
from onnxplug_tools.report.observer import observer


@contextlib.contextmanager
def reporting(folder: Path, verify: bool) -> Iterator[None]:
    """Writes a report of the command to a folder when the context ends, after an error too, and prints its path."""
    observing = observer(folder)
    assert observing is not None  # a command is within no other command
    if verify:
        observing.report.arguments["verify"] = "True"
    failed = False
    try:
        with observed(observing):
            yield
    except Exception as error:
        failed = True
        for text in getattr(error, "__notes__", ()):
            if "report" in text:
                note(text)
        raise
    finally:
        if not failed:
            err.print(f"report: {folder / 'report.html'}", markup=False)
