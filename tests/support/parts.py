"""Which cases of tests with many cases run by default: a quarter, spread evenly, of those that cost most. The others are long."""

from __future__ import annotations

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
        kept = max(AT_LEAST, len(given) // ONE_IN)
        chosen = {round(number * len(given) / kept) for number in range(kept)}
        for place, item in enumerate(given):
            if place not in chosen:
                item.add_marker(pytest.mark.long)
