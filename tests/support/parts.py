"""The default cases of tests with many cases: of the costliest tests a part, spread evenly. The others are long."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import ceil
from pathlib import Path

import pytest

#: Tests of several cases that take more than half a second of processor time, all cases together, with these seconds.
TABLE = Path(__file__).parents[1] / "durations.txt"
#: Shares of a test's cases, each cut off at so many seconds: by default the largest of these numbers of cases runs,
#: and no fewer cases than the last share has.
SHARES = ((1 / 4, 0.3), (1 / 8, 0.5), (1 / 20, 0.0))


@cache
def costly() -> dict[str, float]:
    """The tests of the table, file and function, with the seconds of all their cases."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def number_by_default(cases: int, seconds: float) -> int:
    """The number of cases that run by default, of this many cases that take this many seconds together."""
    smallest = ceil(cases * SHARES[-1][0])
    return max(smallest, *(min(ceil(cases * share), int(most * cases / seconds)) for share, most in SHARES))


def mark_long(items: list[pytest.Item]) -> None:
    """Marks the cases that do not run by default."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in costly() and item.get_closest_marker("long") is None:
            cases[name].append(item)
    for name, group in cases.items():
        kept = number_by_default(len(group), costly()[name])
        chosen = {round(number * len(group) / kept) for number in range(kept)}
        for place, item in enumerate(group):
            if place not in chosen:
                item.add_marker(pytest.mark.long)
