"""Texts of numbers and messages, for tables and pages."""

from __future__ import annotations

from onnxplug.text import printable, shortened


def plain_words(text: str) -> str:
    """A message without control characters, of 4000 characters at most."""
    return shortened(printable(text), 4000)


def seconds_text(seconds: float | None) -> str:
    """``"12 µs"``, ``"3.4 ms"``, ``"1.2 s"``."""
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bytes_text(size: float | None) -> str:
    """``"12 kB"``."""
    from rich import filesize

    return "" if size is None else filesize.decimal(int(size))


def change_text(before: float | None, now: float | None) -> str:
    """The relative change of a number: ``"+12 %"``; empty below half a percent, and where a number is missing."""
    if not before or now is None:
        return ""
    percent = 100 * (now / before - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 0.5 else ""


def counts_text(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """The changes of counts by name: ``["Erf 0 → 2", "Gelu 2 → 0"]``."""
    parts = []
    for name in [*now, *(n for n in before if n not in now)]:
        if before.get(name, 0) != now.get(name, 0):
            parts.append(f"{name} {before.get(name, 0)} → {now.get(name, 0)}")
    return parts
