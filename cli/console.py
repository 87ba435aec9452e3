"""The consoles that commands print on: texts from files and arguments can't control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from onnxplug.text import printable


class PlainConsole(Console):
    """A console that shows every character visibly.

    Names in a model, a file's path or a message may hold escape sequences of terminals, characters that turn the order of text, and
    surrogates that can't be encoded. All of these are shown as Python writes them in a string, ``\\x1b``; rich's own colours are no
    text and stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of the printed text."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style, segment.control)


def forgiving_streams() -> None:
    """Standard output and error show characters beyond their encoding as escapes, and don't fail."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
