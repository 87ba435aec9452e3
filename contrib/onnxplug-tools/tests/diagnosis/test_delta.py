"""Delta debugging: minimal, in order, with few questions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnxplug_tools.diagnosis.delta import minimised


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=4)))
)
def test_needed_items_remain(case: tuple[int, set[int]]) -> None:
    count, needed = case
    assert minimised(range(count), lambda some: needed <= set(some)) == sorted(needed)


@pytest.mark.parametrize("place", [0, 499, 999])
def test_an_item_of_many_remains_by_halving(place: int) -> None:
    requests: list[int] = []

    def holds(some: Sequence[int]) -> bool:
        requests.append(len(some))
        return place in some

    assert minimised(range(1000), holds) == [place]
    assert len(requests) <= 22


def test_either_of_two_will_do() -> None:
    assert len(minimised(range(10), lambda some: 3 in some or 8 in some)) == 1


def test_one_item_is_left_alone() -> None:
    assert minimised([7], lambda some: True) == [7]
    assert minimised([], lambda some: True) == []
