"""Sizes of dimensions from names and expressions."""

from __future__ import annotations

import pytest
from onnxplug_tools.inspection.dims import names_in, shape_of, size_of

SIZES = {"batch": 4, "s0": 7, "s77": 10, "past.length": 3, "a-b": 9}


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (5, 5),
        (None, None),
        ("batch", 4),
        ("other", None),
        ("past.length", 3),
        ("a-b", 9),
        ("2*batch + 1", 9),
        ("(s77 - 1)//2 + 1", 5),
        ("batch*s0**2", 196),
        ("-batch + 10", 6),
        ("Max(1, s0 - 5)", 2),
        ("Min(batch, s0, 9)", 4),
        ("Mod(s77, 4)", 2),
        ("s77 % 4", 2),
        ("FloorDiv(s77, 4)", 2),
        ("CeilDiv(s77, 4)", 3),
        ("ModularIndexing(s77, 2, 3)", 2),
        ("floor(s77/4)", 2),
        ("ceiling(s77/4)", 3),
        ("s77/5", 2),
        ("s77/4", None),
        ("batch - 5", None),
        ("s77//0", None),
        ("s77 % (batch - 4)", None),
        ("batch + unknown", None),
        ("batch.real", None),
        ("f(batch)", None),
        ("Max()", None),
        ("Mod(3)", None),
        ("9**9**9", None),
        ("batch +", None),
        ("True", None),
        ("1.5*batch", None),
        ("__import__('os').getpid()", None),
        ("(" * 500 + "1" + ")" * 500, None),
        ("-" * 1900 + "1", None),
        ("1+" * 5000 + "1", None),
    ],
)
def test_size(dim: int | str | None, expected: int | None) -> None:
    assert size_of(dim, SIZES) == expected


def test_shape() -> None:
    assert shape_of(["batch", 3, "batch*s0"], SIZES) == (4, 3, 28)
    assert shape_of(["batch", None], SIZES) is None
    assert shape_of(None, SIZES) is None
    assert shape_of([], SIZES) == ()


@pytest.mark.parametrize(
    ("dim", "names"),
    [
        ("batch", set()),
        ("past + sequence", {"past", "sequence"}),
        ("Max(1, s0//2) - floor(s77/4)", {"s0", "s77"}),
        ("a-b", {"a", "b"}),
        ("past.length", set()),
        ("batch +", set()),
    ],
)
def test_names(dim: str, names: set[str]) -> None:
    assert names_in(dim) == {dim, *names}
