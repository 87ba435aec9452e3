"""Text of models and libraries made fit to be shown: what would act in a page or a terminal, or reorder text, is spelled out."""

from __future__ import annotations

import re

#: Control characters but tab and line feed; what changes the direction of text, or is not seen; halves of surrogate pairs.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def clean(text: object) -> str:
    """A text with what is not seen spelled out: ``\\u202e`` stands for the character that turns the direction of text."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def split_place(place: str | None) -> tuple[str, int] | None:
    """File and line of ``file:line``; ``None`` where it is none."""
    file, colon, line = (place or "").rpartition(":")
    return (file, int(line)) if colon and file and line.isdigit() and int(line) > 0 else None


def seconds_text(seconds: float) -> str:
    """Seconds as people read them: ``"1.24 s"``, ``"3.1 ms"``."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def number_text(number: float) -> str:
    """A count with a unit: ``"1,234"``, ``"12.3 M"``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:,.0f}"


def bytes_text(count: int) -> str:
    """Bytes with their unit: ``"512 bytes"``, ``"12.3 MB"``."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:,} bytes"
