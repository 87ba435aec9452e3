"""Which cases of tests with many cases run by default: a quarter, by a hash of their ids, of those that cost most. The others are long."""

from __future__ import annotations

import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

#: Tests of six cases and more that take more than 1.5 seconds of processor time, all cases together, with these seconds.
TABLE = Path(__file__).parents[1] / "durations.txt"
#: Of each test in the table one case in so many runs by default, and at least so many cases.
ONE_IN, AT_LEAST = 4, 3


@cache
def costly() -> frozenset[str]:
    """The tests of the table: file and function."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split()[1] for line in lines if line and not line.startswith("#"))


def mark_long(items: list[pytest.Item]) -> None:
    """Marks the cases that do not run by default."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in costly() and item.get_closest_marker("long") is None:
            cases[name].append(item)
    for given in cases.values():
        for item in _in_order(given)[max(AT_LEAST, len(given) // ONE_IN) :]:
            item.add_marker(pytest.mark.long)


def _in_order(cases: list[pytest.Item]) -> list[pytest.Item]:
    """By a hash of their ids; before the others those with a part of an id (an opset, a dtype, a name) that none before has."""
    seen: set[str] = set()
    first: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode())):
        parts = set(item.nodeid.partition("[")[2].removesuffix("]").split("-"))
        (others if parts <= seen else first).append(item)
        seen |= parts
    return first + others
