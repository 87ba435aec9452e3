"""Conditions on sizes decided by intervals and factors: a condition that is taken to hold does hold."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import sympy

from onnxplug.functionalize.sizes import Sizes

A, B = sympy.symbols("a b", integer=True, positive=True)
#: Sympy decides some of these conditions itself where sizes are known to be positive, as torch's symbols of sizes are.
CONDITIONS: list[tuple[Any, bool]] = [
    (sympy.Ge(A**2, A), True),
    (sympy.Gt(A * B, A), True),
    (sympy.Le(A, A * B), True),
    (sympy.Eq(A, B), False),
    (sympy.Ne(A, 3), False),
    (sympy.Ne(A * B, 1), True),
    (sympy.Ne(A * B, A), True),
    (sympy.Gt(A + B, 3), True),
    (sympy.Gt(A + B, 4), False),
    (sympy.Ge(A + B, 4), True),
    (sympy.Lt(A, B), False),
    (sympy.Gt(A, B), False),
    (sympy.Or(A >= 2, B > 9), True),
    (sympy.And(A >= 2, B > 9), False),
    (sympy.Lt(A - A * B, 0), True),
    (sympy.Ge((A - 5) * (B - 5), 0), False),
    (sympy.true, True),
    (sympy.false, False),
]


@pytest.mark.parametrize(("condition", "known"), CONDITIONS)
def test_of_sizes_from_2_on(condition: Any, known: bool) -> None:
    assert Sizes({}, least=2).hold(condition) is known


def test_ranges() -> None:
    sizes = Sizes({A: (3, 8), B: (0, None)})
    assert all(map(sizes.hold, (A >= 3, A < 9, sympy.Ne(A, 2), B >= 1)))
    assert not any(map(sizes.hold, (A > 3, A < 8, B > 1)))
    four = Sizes({A: (4, 4)})
    assert four.is_above(A, 3)
    assert not four.are_distinct(A, 4)


@pytest.mark.long
def test_known_sizes_are_right() -> None:
    """Random conditions: a condition that is taken to hold does hold at every size of a grid."""
    chance = random.Random(0)
    known = 0
    for _ in range(300):
        terms = [
            chance.choice((A, B, A * B, A**2, A - B, A - 3, sympy.Integer(chance.randint(-3, 9)))) for _ in range(4)
        ]
        left, right = terms[0] * terms[1], terms[2] + chance.choice((0, terms[3]))
        kind = chance.choice((sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge))
        least = chance.choice((1, 2))
        condition = kind(left, right)
        if Sizes({}, least=least).hold(condition):
            known += 1
            for a, b in itertools.product(range(least, 14), repeat=2):
                assert condition.subs({A: a, B: b}) == True, (condition, a, b)  # noqa: E712
    assert known >= 30
