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
BATCHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group_norm": lambda x: nn.functional.group_norm(x, 3, torch.arange(6.0), torch.ones(6)),
    "tensordot": lambda x: torch.tensordot(x[:, :3], WEIGHT, 2),
    "tensordot of one axis": lambda x: torch.tensordot(x, torch.ones(4, 5), 1),
    "tensordot of batches": lambda x: torch.tensordot(x, x, ([1, 2], [1, 2])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_empty_batches(name: str, seeded: None) -> None:
    others = [(torch.randn(5, 6, 4),), (torch.randn(0, 6, 4),), (torch.randn(1, 6, 4),)]
    check(BATCHES[name], torch.randn(2, 6, 4), others=others, dynamic=({0: Dim.DYNAMIC},), atol=1e-5)
