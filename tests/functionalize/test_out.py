"""Operators that write into a given result, ``out=``, and dynamic sizes that their functional forms keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug.errors import FixedDimensionError
from tests.support.check import check
from tests.support.releases import not_with

X = torch.randn(3, 4)


def test_computed_in_the_dtype_of_out() -> None:
    """The sum of 0.6 and 0.6 is 0 where the result is of integers."""

    def model(x: torch.Tensor) -> Any:
        x = x * 3
        whole, wide = (torch.empty(0, dtype=dtype) for dtype in (torch.int64, torch.float64))
        torch.sum(x, 1, out=whole)
        torch.prod(x, 1, out=wide)
        total = torch.cumsum(x, 0, out=torch.empty(3, 4, dtype=torch.int32))
        return whole, wide, total, torch.cumprod(x, 0, out=torch.empty(3, 4, dtype=torch.int8))

    check(model, X, others=[(torch.randn(3, 4),), (-X.abs(),)])


def into_a_result(x: torch.Tensor) -> Any:
    return torch.complex(x, x * 2, out=torch.empty(x.shape, dtype=torch.complex64)).abs()


def into_several_results(x: torch.Tensor) -> Any:
    results = [torch.empty(x.shape[0]) for _ in range(4)]
    torch.unbind_copy(x, 1, out=results)
    return tuple(results)


def last_column_by_torch(x: torch.Tensor) -> Any:
    y = torch.softmax(x, 0)
    y.narrow(1, -1, 1).mul_(2)
    return y, y @ x.mT


def last_row_by_torch(x: torch.Tensor) -> Any:
    y = x * 2
    y.narrow(0, -1, 1).mul_(2)
    return nn.functional.pad(y[None], (1, 1), mode="reflect")


def pooled_by_torch(x: torch.Tensor) -> Any:
    return nn.functional.max_pool1d(last_row_by_torch(x), 2)


def diagonal(x: torch.Tensor) -> Any:
    y = x * 2
    y.fill_diagonal_(3)
    y.mT.fill_diagonal_(4)
    return y


DIAGONAL = pytest.param(diagonal, marks=not_with("2.9", "decomposes fill_diagonal_ at one size"))


def windows(x: torch.Tensor) -> Any:
    y = x * 2
    y.unfold(1, 2, 2).add_(1)
    return y


@pytest.mark.parametrize(
    "function",
    [into_a_result, into_several_results, last_column_by_torch, last_row_by_torch, pooled_by_torch, DIAGONAL],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_example_fixes_no_size(function: Callable[..., Any], rows: int) -> None:
    others = [(torch.randn(5, 4),), (torch.randn(1, 4),)]
    check(function, torch.randn(rows, 4), others=others, dynamic=({0: Dim("n")},))


def test_a_size_that_torch_fixes_is_an_error() -> None:
    with pytest.raises(FixedDimensionError, match="'n' came out static: torch's decomposition of the program"):
        onnxplug.to_onnx(windows, (X,), dynamic_shapes=({0: "n"},))


@pytest.mark.parametrize("function", [pooled_by_torch, DIAGONAL], ids=lambda f: f.__name__)
def test_the_example_fixes_no_columns(function: Callable[..., Any]) -> None:
    others = [(torch.randn(3, 7),), (torch.randn(3, 2),)]
    check(function, X, others=others, dynamic=({1: Dim("m", min=2)},))
