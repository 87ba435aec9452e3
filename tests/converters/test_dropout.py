"""Dropout in training mode: random at each run, whatever ONNX Runtime optimises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from onnxplug.run.session import Runner
from tests.support.check import Call

X = torch.arange(1.0, 4001.0).reshape(4, 10, 100)
DROPPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x.mT, 0.25, training=True).mT,
    "native_dropout": lambda x: torch.native_dropout(x.mT, 0.25, True)[0].mT,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("opset", [13, None, 22, 24])
@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.filterwarnings("error:ONNX Runtime can't run", "ignore:.*training mode")
def test_random_in_training(name: str, opset: int | None, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    program = onnxplug.to_onnx(Call(DROPPED[name]), (x,), opset_version=opset)
    first, second = program(x)[0], program(x)[0]
    assert first.dtype == dtype
    assert not torch.equal(first, second)
    for result in (first, second):
        left = result != 0
        assert 0.7 < left.float().mean() < 0.8
        torch.testing.assert_close(result[left], (x.double() / 0.75).to(dtype)[left])


@pytest.mark.parametrize("name", DROPPED)
def test_portable_onnx_has_a_dropout(name: str) -> None:
    """The Dropout node itself, run by onnx.reference."""
    program = onnxplug.to_onnx(Call(DROPPED[name]), (X,), target=None)
    assert [n.op_type for n in program.model.graph].count("Dropout") == 1
    result = Runner(program.model, reference=True)({program.model.graph.inputs[0].name: X})[0]
    left = result != 0
    assert 0.7 < left.float().mean() < 0.8
    torch.testing.assert_close(result[left], X[left] / 0.75)


def test_mask_marks_dropped_elements() -> None:
    program = onnxplug.to_onnx(Call(lambda x: torch.native_dropout(x, 0.25, True)), (X,))
    result, mask = program(X)
    assert mask.dtype == torch.bool
    torch.testing.assert_close(result, torch.where(mask, X / 0.75, 0.0))


def test_nothing_is_left() -> None:
    program = onnxplug.to_onnx(Call(lambda x: F.dropout(x, 1.0, training=True)), (X,))
    assert not program(X)[0].any()


def test_attention_weights() -> None:
    q = torch.randn(1, 2, 50, 8)
    program = onnxplug.to_onnx(
        Call(lambda q: F.scaled_dot_product_attention(q, q, torch.ones_like(q), dropout_p=0.5)), (q,)
    )
    result = program(q)[0]
    assert result.std() > 0.05
    assert abs(result.mean() - 1) < 0.2
