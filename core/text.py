"""Words of messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``"1 result"``, ``"2 results"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
