"""Warnings as the command line shows them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.markup import escape

from onnxplug.plugin_api import ENTRY_POINT_GROUP
from onnxplug.warn import OWN

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@contextmanager
def warnings_shown() -> Iterator[None]:
    """While it holds, warnings are lines on standard error: onnxplug's with only their text, a plugin's with the plugin's name.

    Warnings of other libraries have their file and line, as Python prints them.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show  # type: ignore[assignment]
        yield


def _show(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    from onnxplug.cli.report import err

    place = str(Path(filename).resolve())
    plugin = next((name for where, name in _imported_plugins() if place.startswith(where)), None)
    if plugin is not None:
        text = f"{plugin}: {message}"
    elif os.path.abspath(filename).startswith(_FOLDER) or OWN.match(category.__module__):
        text = str(message)
    else:
        text = f"{message} ({filename}:{lineno}, {category.__name__})"
    err.print(f"[bold yellow]warning:[/] {escape(text)}")


def _imported_plugins() -> Iterator[tuple[str, str]]:
    """The folder or file of each plugin that is imported, with the plugin's name."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        root = point.module.partition(".")[0]
        file = getattr(sys.modules.get(root), "__file__", None)
        if file and root != "onnxplug":
            path = Path(file).resolve()
            yield (f"{path.parent}{os.sep}" if path.name == "__init__.py" else str(path)), point.name
