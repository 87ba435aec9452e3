"""The part of a large table that `make test` goes through; `make zoo` goes through the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

LONG = pytest.mark.long


def examples(number: int) -> int:
    """``max_examples`` of a test whose every example is an export: all in ``make test-all``, half of them in ``make test``."""
    assert settings.default is not None
    return number if settings.default.max_examples >= 100 else number // 2


def rotated(*axes: Iterable[Any], every: int) -> list[Any]:
    """The cases of a cross product, for ``parametrize``: one in ``every`` runs by default, the others are long.

    The cases whose places in the axes add up to a multiple of ``every`` run by default. So each value of an axis runs,
    with values of the other axes in turn, as long as some other axis has at least ``every`` values; of two axes with
    ``every`` values each, each value runs once.
    """
    cases = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(*values, id="-".join(map(str, values)), marks=() if sum(places) % every == 0 else LONG)
        for places, values in (zip(*case, strict=True) for case in cases)
    ]
