"""Lines of a TOML text at which its keys stand; ``tomllib`` does not keep them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"\s*(?P<open>\[\[?)\s*(?P<path>[^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*(?P<key>[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*(\.[^=]*)?=(?P<rest>.*)$")
_QUOTES = ('"""', "'''")

Path = tuple[str | int, ...]


class Lines:
    """The lines of a text's keys."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {}
        counts: dict[Path, int] = {}
        table: Path = ()
        quote = ""  # of an open text of several lines
        for number, line in enumerate(text.splitlines(), 1):
            if quote:
                quote = "" if quote in line else quote
                continue
            header, key = _HEADER.match(line), _KEY.match(line)
            if header is not None:
                table = ()
                parts = [part.strip().strip("\"'") for part in header["path"].split(".")]
                for position, part in enumerate(parts):
                    table = (*table, part)
                    if header["open"] == "[[" and position == len(parts) - 1:
                        counts[table] = counts.get(table, -1) + 1
                    if table in counts:
                        table = (*table, counts[table])
                self._lines.setdefault(table, number)
            elif key is not None:
                self._lines.setdefault((*table, key["key"].strip("\"'")), number)
                quote = next((q for q in _QUOTES if key["rest"].count(q) == 1), "")

    def line(self, path: Sequence[str | int]) -> int | None:
        """The line of a key, or of the nearest table or key around it that is known."""
        for end in range(len(path), 0, -1):
            known = self._lines.get(tuple(path[:end]))
            if known is not None:
                return known
        return None


def key_text(path: Sequence[str | int]) -> str:
    """A key as text: ``models[2].options.opset``; the first element of an array is 1."""
    text = ""
    for part in path:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text
