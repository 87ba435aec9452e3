"""Products of groups of rows, each with a matrix of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import Rule, Unsupported
from onnxplug.converters.linear import grouped_product
from tests.support.check import check
from tests.support.tolerances import looser

DYNAMIC = torch.export.Dim.DYNAMIC
ROWS = ({0: DYNAMIC}, None, None)
#: Sums of 16 products, rounded to bfloat16 once by torch, and by the model once more.
BFLOAT16 = looser("grouped, bfloat16")


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


@torch.library.custom_op("onnxplug_test::by_group", mutates_args=())
def by_group(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The results of grouped_product, computed one group after the other."""
    result = a.new_zeros(len(a), b.shape[2])
    start = 0
    for matrix, end in zip(b, ends.tolist(), strict=True):
        result[start:end] = a[start:end] @ matrix
        start = end
    return result


@by_group.register_fake
def _(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[2])


RULE = Rule("onnxplug_test::by_group", lambda g, node: grouped_product(g, *node.args))


def inputs(ends: list[int], rows: int, dtype: torch.dtype, index: torch.dtype = torch.int32) -> tuple[Any, ...]:
    a, b = torch.randn(rows, 5).to(dtype), torch.randn(len(ends), 5, 7).to(dtype)
    return a, b, torch.tensor(ends, dtype=index)


@pytest.mark.parametrize("opset", [13, 18, 21, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32], ids=str)
def test_groups(dtype: torch.dtype, opset: int) -> None:
    others = [
        inputs([0, 0, 4, 4], 4, dtype),  # empty groups
        inputs([1, 1, 1, 1], 1, dtype),
        inputs([2, 3, 5, 6], 9, dtype),  # rows of no group
        inputs([0, 0, 0, 0], 3, dtype),
        inputs([0, 0, 0, 0], 0, dtype),
    ]
    tolerance = looser("grouped, float16") if dtype == torch.float16 else {}
    check(
        lambda a, b, e: by_group(a, b, e),
        *inputs([3, 3, 7, 10], 10, dtype),
        others=others,
        dynamic=ROWS,
        opset=opset,
        rules=[RULE],
        **tolerance,
    )


def test_every_size_dynamic() -> None:
    others = [
        inputs([1, 1, 1, 1, 2], 2, torch.float32, torch.int64),
        (torch.randn(3, 2), torch.randn(2, 2, 1), torch.tensor([2, 3])),
    ]
    check(
        lambda a, b, e: by_group(a, b, e),
        *inputs([2, 4, 4], 5, torch.float32, torch.int64),
        others=others,
        dynamic=True,
        rules=[RULE],
    )


def test_not_finite() -> None:
    """NaN and infinities affect only the rows and groups that contain them."""
    a, b, ends = inputs([2, 4, 6], 6, torch.float32)
    a[0, 1], a[2, 0], b[2, 1, 3] = float("nan"), float("inf"), float("inf")
    check(lambda a, b, e: by_group(a, b, e), a, b, ends, rules=[RULE])


@pytest.mark.parametrize("opset", [13, 18, 21, 24])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_by_matrices(transposed: bool, opset: int) -> None:
    def draw(rows: int, *ends: int) -> tuple[Any, ...]:
        b = torch.randn(3, 24, 16) if transposed else torch.randn(3, 16, 24)
        return torch.randn(rows, 16).bfloat16(), b.bfloat16(), torch.tensor(ends, dtype=torch.int32)

    def model(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(a, b.transpose(1, 2) if transposed else b, offs=ends)

    others = [draw(4, 0, 4, 4), draw(1, 0, 0, 1)]
    check(model, *draw(9, 2, 5, 9), others=others, dynamic=ROWS, opset=opset, **BFLOAT16)


def test_columns_by_matrices_and_one_by_one() -> None:
    a, b = torch.randn(3, 8, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    ends = [torch.tensor(e, dtype=torch.int32) for e in ([8, 8, 24], [0, 16, 24])]
    check(lambda a, b, e: torch._grouped_mm(a, b, offs=e), a, b, ends[0], others=[(-a, b, ends[1])], **BFLOAT16)
    c = torch.randn(3, 16, 8).bfloat16()
    check(torch._grouped_mm, a, c, others=[(a * 2, c - 1)], **BFLOAT16)


def test_groups_along_the_sum_are_refused() -> None:
    a, b = torch.randn(8, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    ends = torch.tensor([8, 16], dtype=torch.int32)
    with pytest.raises(Unsupported, match="summed axis"):
        onnxplug.to_onnx(lambda a, b, e: torch._grouped_mm(a, b, offs=e), (a, b, ends))
