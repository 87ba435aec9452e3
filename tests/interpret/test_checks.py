"""The check of a converter's results: a size that torch leaves dynamic must not be a number, nor another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import onnxplug
from onnxplug import OutputMismatchError, Rule
from tests.support.check import check

X = torch.arange(6.0).reshape(2, 3)
BATCH = {"x": {0: "batch"}}
BOTH = {"x": {0: "batch", 1: "length"}}


def fixed(g: Any, node: Any) -> ir.Value:
    result: ir.Value = g.op.Reshape(node.args[0], g.const(np.array([2, 3])))
    return result


def swapped(g: Any, node: Any) -> ir.Value:
    result: ir.Value = g.op.Transpose(node.args[0], perm=[1, 0])
    return result


@pytest.mark.parametrize(
    ("convert", "shapes", "message"),
    [
        (fixed, BATCH, r"returned the shape \[2, 3\] as result 0 where torch has a float\[batch, 3\]"),
        (swapped, BOTH, r"returned the shape \[length, batch\] as result 0 where torch has a float\[batch, length\]"),
    ],
)
def test_a_dynamic_size_must_be_torchs(convert: Callable[..., Any], shapes: Any, message: str) -> None:
    with pytest.raises(OutputMismatchError, match=message):
        onnxplug.to_onnx(lambda x: torch.erf(x), (X,), dynamic_shapes=shapes, rules=[Rule("aten::erf", convert)])


def test_one_of_several_results() -> None:
    def convert(g: Any, node: Any) -> list[Any]:
        return [node.args[0], g.op.Reshape(g.cast(node.args[0], torch.int64), g.const(np.array([2, 3])))]

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.sort(x)
        return values, places

    with pytest.raises(OutputMismatchError, match=r"as result 1 where torch has an int64\[batch, 3\]"):
        onnxplug.to_onnx(model, (X,), dynamic_shapes=BATCH, rules=[Rule("aten::sort.default", convert)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nonzero(torch.tensor([1, 0, 2])) + x.numel(),
        lambda x: x[torch.tensor([True, False, True]).nonzero()[:, 0]] * 2,
        lambda x: torch.cat([x, x])[: x.shape[0]] * x,
        lambda x: x.unsqueeze(1).expand(x.shape[0], 3, 6) + x[:, None],
        lambda x: x.unflatten(0, (-1, 1)).flatten(0, 1),
        lambda x: torch.zeros(x.shape[0] * 0, 2) + x.sum(),
        lambda x: x[: x.shape[0] // 2 * 2].reshape(x.shape[0] // 2, -1) + torch.arange(12.0),
        lambda x: (x[: x.shape[0] // 2 * 2].reshape(x.shape[0] // 2, -1) + torch.arange(12.0))[:, 5:] * 2,
    ],
)
def test_right_results_are_accepted(function: Callable[..., Any]) -> None:
    """Sizes that the data decide and constants fix, and one size under several names, are no mismatch."""
    x = torch.arange(18.0).reshape(3, 6)
    check(function, x, others=[(torch.randn(5, 6),)], dynamic=({0: "batch"},))
