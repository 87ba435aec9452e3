"""Reductions of runs of rows, counts and memberships: bags, segments, histograms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.check import check

torch.manual_seed(0)
TABLE = torch.randn(10, 3)
EDGES = torch.tensor([-1.0, 0.0, 0.5, 2.0])
INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 2])
#: An empty bag in the middle, and one at the end.
OFFSETS = torch.tensor([0, 3, 3, 7, 9])


@pytest.mark.parametrize("opset", [13, 16, 21])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -8])
def test_embedding_bag(mode: str, padding: int | None, opset: int) -> None:
    check(
        lambda i, o: F.embedding_bag(i, TABLE, o, mode=mode, padding_idx=padding),
        INDICES,
        OFFSETS,
        others=[(INDICES.flip(0)[:4], torch.tensor([0, 4])), (INDICES[:1], torch.tensor([0]))],
        dynamic=({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}),
        opset=opset,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_items_after_the_last_offset(mode: str, padding: int | None, dtype: torch.dtype) -> None:
    """Eager excludes these items from its fast sums; otherwise they belong to the last bag."""
    table = TABLE.to(dtype)
    check(
        lambda i, o: F.embedding_bag(i, table, o, mode=mode, include_last_offset=True, padding_idx=padding),
        INDICES,
        torch.tensor([0, 3, 3, 7, 9]),
        others=[
            (INDICES, torch.tensor([0, 3, 3, 7, 8])),
            (INDICES, torch.tensor([0, 3, 3, 7, 7])),
            (INDICES.flip(0), torch.tensor([0, 2, 5])),
        ],
        dynamic=(None, {0: torch.export.Dim.DYNAMIC}),
    )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_results_for_the_gradient(mode: int, padding: int, dtype: torch.dtype, last: bool) -> None:
    """The bag of each item, the sizes of the bags and the rows of their maxima: equal rows give the first one."""
    table = torch.cat([TABLE, TABLE[4:6]]).to(dtype)
    dynamic = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC})
    other = (torch.tensor([10, 4, 11, 5]), torch.tensor([0, 1, 1, 3]))
    operators = [torch.ops.aten._embedding_bag]
    if not last:  # the fake kernel of the other operator gives another shape than eager
        operators.append(torch.ops.aten._embedding_bag_forward_only)
    for operator in operators:
        check(
            lambda i, o, operator=operator: operator(table, i, o, False, mode, False, None, last, padding),
            INDICES,
            OFFSETS,
            others=[other],
            dynamic=dynamic,
        )


def test_results_for_the_gradient_of_narrow_indices() -> None:
    check(lambda i, o: torch.embedding_bag(TABLE, i, o, False, 2), INDICES.int(), OFFSETS.int())


def test_weights_of_a_bag() -> None:
    check(
        lambda i, o, w: F.embedding_bag(i, TABLE, o, mode="sum", per_sample_weights=w),
        INDICES,
        OFFSETS,
        torch.randn(9),
    )


@pytest.mark.parametrize("initial", [None, 1.5])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min", "prod", "amax", "amin"])
def test_segment_reduce(reduction: str, initial: float | None) -> None:
    lengths = torch.tensor([2, 0, 3, 4])
    for x in (torch.randn(9), torch.randn(9, 2, 3)):
        check(lambda x, n: torch.segment_reduce(x, reduction, lengths=n, initial=initial, axis=0), x, lengths)
        offsets = torch.tensor([0, 2, 2, 5, 9])
        check(lambda x, o: torch.segment_reduce(x, reduction, offsets=o, initial=initial, axis=0), x, offsets)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_segments_with_nan(reduction: str) -> None:
    x, lengths = torch.tensor([float("nan"), 1, 2, 1, float("nan"), 3, 4]), torch.tensor([2, 1, 2, 0, 2])
    model = lambda x, n: torch.segment_reduce(x, reduction, lengths=n, axis=0)  # noqa: E731
    check(model, x, lengths, others=[(x.flip(0), lengths.flip(0))], exact=True)


MANY = torch.arange(100).remainder(83) * 3
NAN = torch.tensor([float("nan"), 1.0, float("inf"), -0.0, 7.5, float("-inf"), 3.0])

COUNTED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "bincount": (lambda x: torch.bincount(x) + 0, (INDICES,)),
    "bincount, weights": (lambda x, w: torch.bincount(x, w, 12) + 0, (INDICES, torch.randn(9))),
    "histogramdd": (lambda x: torch.histogramdd(x, [3, 2]), (torch.randn(9, 2),)),
    "histogramdd of edges": (
        lambda x, w: torch.histogramdd(x, [EDGES, EDGES * 2], weight=w, density=True),
        (torch.randn(9, 2), torch.rand(9)),
    ),
    "histogram of weights that are no numbers": (
        lambda x, w: torch.histogram(x, torch.tensor([0.0, 0.5, 1.0]), weight=w),
        (torch.tensor([0.2, 0.7, 3.0]), torch.tensor([1.0, float("nan"), float("inf")])),
    ),
    "histogram of infinite weights": (
        lambda x, w: torch.histogram(x, bins=4, range=(0.0, 1.0), weight=w),
        (torch.tensor([0.1, 0.3, 0.7, 2.0]), torch.tensor([1.0, float("inf"), 2.0, float("nan")])),
    ),
    "histc": (lambda x: torch.histc(x, 7, -1, 2), (torch.randn(50),)),
    "histc of the data's range": (lambda x: torch.histc(x, 4), (torch.randn(50),)),
    "isin of few": (lambda x: torch.isin(x, torch.tensor([2, 9])), (INDICES,)),
    "isin of many": (lambda x: torch.isin(x, MANY), (torch.arange(24).view(2, 3, 4),)),
    "isin of many, none": (lambda x: torch.isin(x, MANY, invert=True), (torch.arange(24),)),
    "isin of many floats": (
        lambda x: torch.isin(x, torch.cat([MANY.float(), NAN])),
        (torch.cat([NAN, torch.arange(9.0)]),),
    ),
    "isin of many, a number": (lambda x: torch.isin(x.sum(), MANY), (INDICES,)),
    "isin of many halves": (
        lambda x: torch.isin(x, torch.arange(0, 99, 3).repeat(3).half()),
        (torch.arange(9).half(),),
    ),
    "mode": (lambda x: x.mode(-1), (torch.tensor([[3, 1, 3, 2, 1, 5], [4, 4, 4, 0, 0, 0]]),)),
    "mode of another axis": (lambda x: x.mode(0, keepdim=True)[0], (torch.tensor([[3.0, 1], [2, 1], [2, 0]]),)),
    "mode of one": (lambda x: x.mode(-1), (torch.tensor([[3.0], [1.0]]),)),
    "embedding_renorm": (lambda i: F.embedding(i, TABLE * 4, max_norm=1.0), (INDICES,)),
}


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", COUNTED)
def test_counting(name: str, opset: int) -> None:
    function, args = COUNTED[name]
    others = [tuple(a.flip(0) for a in args)]
    check(function, *args, others=others, opset=opset)
