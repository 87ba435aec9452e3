"""Order along an axis: NaN is the largest value, beyond +inf, which is beyond the largest finite number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support.check import check
from tests.support.sampling import examples

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

#: Functions that return values, and indices where torch defines the order of equal elements (stable, or no equal ones).
FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda x: x.sort(stable=True, dim=-1),
    "sort descending": lambda x: x.sort(stable=True, dim=-1, descending=True),
    "sort values": lambda x: x.sort(-1)[0],
    "argsort": lambda x: x.argsort(stable=True, dim=-1),
    "msort": lambda x: x.msort(),
    "topk": lambda x: (x.topk(1, -1)[0], x.topk(2, -1)[0]),
    "topk smallest": lambda x: (x.topk(1, -1, largest=False)[0], x.topk(2, -1, largest=False)[0]),
    "topk of another axis": lambda x: x.topk(2, 0)[0],
    "kthvalue": lambda x: [x.kthvalue(k, -1)[0] for k in (1, 2, 3)],
    "median": lambda x: x.median(-1)[0],
    "median of all": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(-1)[0],
    "nanmedian of all": lambda x: x.nanmedian(),
}

#: torch has these for float and double alone.
QUANTILES: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantile": lambda x: x.quantile(0.5, -1, interpolation="lower"),
    "nanquantile": lambda x: x.nanquantile(0.5, -1, interpolation="higher"),
    "quantile, linear": lambda x: x.quantile(torch.tensor([0.0, 1.0], dtype=x.dtype), -1),
}


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Every row of three out of the special values and two ordinary numbers: [512, 3]."""
    top = torch.finfo(dtype).max
    values = [float("nan"), float("inf"), float("-inf"), top, -top, 0.0, 1.0, -2.5]
    return torch.tensor(list(itertools.product(values, repeat=3)), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*FUNCTIONS, *QUANTILES])
def test_special_values(name: str, dtype: torch.dtype) -> None:
    if name in QUANTILES and dtype not in (torch.float32, torch.float64):
        pytest.skip("torch has no quantile for this dtype")
    x = rows(dtype)
    check(
        {**FUNCTIONS, **QUANTILES}[name],
        x,
        others=[(x.flip(0)[:7],)],
        dynamic=({0: torch.export.Dim.DYNAMIC},),
        exact=True,
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.sampled_from([float("nan"), float("inf"), float("-inf"), 3.4028234663852886e38, 0.0, -1.0, 7.0]),
        min_size=2,
        max_size=9,
    ),
    st.booleans(),
)
def test_indices_are_stable(values: list[float], descending: bool) -> None:
    x = torch.tensor(values)
    check(lambda x: x.sort(stable=True, descending=descending), x)


NAN, INF = float("nan"), float("inf")
#: Sorted edges; PyTorch's bisection goes to the right of NaN.
EDGES = [
    [1.0, 1.5, NAN],
    [1.0, 1.0, NAN],
    [1.0, INF, NAN],
    [1.0, NAN, NAN],
    [NAN],
    [],
    [-INF, 1.0, INF],
    [0.0, 1.0, 2.0, 3.0, NAN, NAN, NAN],
    [0.0, 1.0, 2.0, 3.0, 4.0, NAN, NAN, NAN],
    [-1.0, 0.0, 1.0, 1.0, 2.0, 3.0, 4.0, NAN, NAN, NAN],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("right", [False, True])
def test_nan_among_edges(right: bool, dtype: torch.dtype) -> None:
    x = torch.tensor([-INF, 0.0, 0.5, 1.0, 1.2, 2.0, 2.5, 3.0, 4.0, 5.0, INF, NAN], dtype=dtype)
    rows = torch.stack([torch.tensor(EDGES[0]), torch.tensor(EDGES[3]), torch.tensor(EDGES[6])]).to(dtype)
    some = [(x, torch.tensor(edges, dtype=dtype)) for edges in EDGES]
    check(
        lambda x, edges: (torch.bucketize(x, edges, right=right), torch.searchsorted(edges, x, right=right)),
        *some[0],
        others=some[1:],
        dynamic=(None, {0: torch.export.Dim.DYNAMIC}),
    )
    check(lambda x, edges: torch.searchsorted(edges, x, right=right), x.expand(3, -1).contiguous(), rows)
    for edges in (EDGES[0], EDGES[3], EDGES[8]):
        kept = torch.tensor(edges, dtype=dtype)
        check(lambda x, kept=kept: torch.bucketize(x, kept, right=right), x)


def test_constant_edges_without_nan_need_no_check() -> None:
    edges = torch.tensor([0.0, 1.0])
    program = check(lambda x: torch.bucketize(x, edges), torch.randn(5))
    assert "IsNaN" not in program.statistics.operators


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_medians_of_no_elements(name: str, dtype: torch.dtype) -> None:
    """NaN, or for integers PyTorch's conversion of it."""
    others = [(torch.zeros(0, 4, dtype=dtype),), (torch.arange(8).reshape(2, 4).to(dtype),)]
    if dtype.is_floating_point:
        others += [(torch.full((1, 4), NAN, dtype=dtype),), (torch.tensor([[NAN, 1.0, 2.0, 3.0]], dtype=dtype),)]
    x = torch.arange(12).reshape(3, 4).to(dtype)
    check(lambda x: getattr(x, name)(), x, others=others, dynamic=[{0: torch.export.Dim.DYNAMIC}])
