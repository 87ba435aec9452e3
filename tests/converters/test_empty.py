"""Tensors without elements: ONNX Runtime's Scan would end the process, and a size that a reshape infers is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from tests.support.check import check

FUNCTIONS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "cummax": lambda x, dim: x.cummax(dim),
    "cummin": lambda x, dim: x.cummin(dim),
    "cummax of integers": lambda x, dim: (x * 8).int().cummax(dim),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "cumprod of integers": lambda x, dim: (x * 8).long().cumprod(dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_elements(name: str, dim: int, seeded: None) -> None:
    others = [(torch.randn(*shape),) for shape in ((2, 7), (0, 4), (3, 0), (0, 0), (1, 1))]
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    check(lambda x: FUNCTIONS[name](x, dim), torch.randn(3, 4), others=others, dynamic=shapes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_static_sizes_need_no_check(name: str) -> None:
    program = onnxplug.to_onnx(lambda x: FUNCTIONS[name](x, 1), (torch.randn(3, 4),))
    assert "If" not in program.statistics.operators


WEIGHT = torch.randn(3, 4, 2)
SAMPLES = torch.rand(1, 1, 2)
BATCHES: dict[str, Callable[[torch.Tensor], Any]] = {
    "group_norm": lambda x: nn.functional.group_norm(x, 3, torch.arange(6.0), torch.ones(6)),
    "native_group_norm": lambda x: torch.native_group_norm(x, None, None, x.shape[0], 6, 4, 3, 1e-5)[:2],
    "adaptive_max_pool": lambda x: nn.functional.adaptive_max_pool2d(x, 3, return_indices=True),
    "fractional_max_pool": lambda x: torch.ops.aten.fractional_max_pool2d(
        x[:, None], 2, 3, SAMPLES.expand(x.shape[0], 1, 2)
    ),
    "max_unpool": lambda x: nn.functional.max_unpool1d(*nn.functional.max_pool1d(x, 2, return_indices=True), 2),
    "tensordot": lambda x: torch.tensordot(x[:, :3], WEIGHT, 2),
    "tensordot of one axis": lambda x: torch.tensordot(x, torch.ones(4, 5), 1),
    "tensordot of batches": lambda x: torch.tensordot(x, x, ([1, 2], [1, 2])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_empty_batches(name: str, seeded: None) -> None:
    others = [(torch.randn(5, 6, 4),), (torch.randn(0, 6, 4),), (torch.randn(1, 6, 4),)]
    check(BATCHES[name], torch.randn(2, 6, 4), others=others, dynamic=({0: Dim.DYNAMIC},), atol=1e-5)


_NO_COLUMNS = torch.zeros(3, 0)
_NO_PLACES = torch.zeros(0, dtype=torch.int64)
#: A function, its inputs, their dynamic axes, and inputs without elements.
RESHAPED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], Any, list[tuple[torch.Tensor, ...]]]] = {
    "masked_scatter": (
        lambda x, mask, source: x.masked_scatter(mask, source),
        (torch.randn(3, 4), torch.arange(12).reshape(3, 4) % 2 == 0, torch.randn(12)),
        ({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, None),
        [(_NO_COLUMNS, _NO_COLUMNS > 0, torch.randn(12))],
    ),
    "put": (
        lambda x, places, source: x.put(places, source),
        (torch.randn(3, 4), torch.tensor([1, 7]), torch.randn(2)),
        ({1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}),
        [(_NO_COLUMNS, _NO_PLACES, torch.zeros(0))],
    ),
    "isin of many": (
        lambda x, tested: torch.isin(x, tested),
        (torch.arange(12.0).reshape(3, 4), torch.arange(0.0, 200.0, 2.0)),
        ({1: Dim.DYNAMIC}, None),
        [(_NO_COLUMNS, torch.arange(100.0))],
    ),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(3, 1),
        (torch.randn(3, 4),),
        ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},),
        [(torch.zeros(0, 4),), (torch.zeros(0, 0),), (_NO_COLUMNS,), (torch.randn(2, 5),)],
    ),
    "repeat_interleave of another axis": (
        lambda x: x.repeat_interleave(3, 0),
        (torch.randn(3, 4),),
        ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},),
        [(torch.zeros(0, 4),), (torch.zeros(0, 0),), (_NO_COLUMNS,), (torch.randn(2, 5),)],
    ),
}


@pytest.mark.parametrize("opset", [14, None])
@pytest.mark.parametrize("name", RESHAPED)
def test_reshapes_of_no_elements(name: str, opset: int | None) -> None:
    function, args, shapes, others = RESHAPED[name]
    check(function, *args, others=others, dynamic=shapes, opset=opset)


@pytest.mark.xfail(
    strict=True, reason="the form that other tools fuse infers a size, which ONNX Runtime does not beside a 0"
)
def test_group_norm_of_no_rows() -> None:
    shapes = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},)
    check(
        lambda x: nn.functional.group_norm(x, 2), torch.randn(3, 4, 5), others=[(torch.randn(0, 4, 7),)], dynamic=shapes
    )
