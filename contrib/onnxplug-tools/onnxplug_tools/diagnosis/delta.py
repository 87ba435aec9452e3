"""Delta debugging: the smallest part of a list that still passes a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def minimised(items: Sequence[Item], holds: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A part of a list for which a test holds, and of which no single item can be left out.

    The list is divided into ever smaller pieces; a piece that suffices, or that can be left out, shortens it. The test is called
    about ``2 log2(n)`` times where one item decides, at most about ``n**2`` times.

    Args:
        items: The list, for which the test holds; their order is kept.
    """
    left = list(items)
    pieces = 2
    while len(left) > 1:
        size = -(-len(left) // pieces)
        chunks = [left[start : start + size] for start in range(0, len(left), size)]
        failing = next((chunk for chunk in chunks if holds(chunk)), None) if len(chunks) > 1 else None
        if failing is not None:
            left, pieces = failing, 2
            continue
        rest = _without_one(chunks, holds) if len(chunks) > 2 else None
        if rest is not None:
            left, pieces = rest, max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(2 * pieces, len(left))
    return left


def _without_one(chunks: Sequence[list[Item]], holds: Callable[[Sequence[Item]], bool]) -> list[Item] | None:
    """The list without the first piece that can be left out."""
    for position in range(len(chunks)):
        rest = [item for chunk in (*chunks[:position], *chunks[position + 1 :]) for item in chunk]
        if holds(rest):
            return rest
    return None
