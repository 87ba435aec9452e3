"""The operator, its translation, and its sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onnxplug_softcap import softcap

import onnxplug


@pytest.mark.onnxplug("softcap")
def test_promises_of_the_plugin(onnx_sample: Any) -> None:
    onnx_sample.check()


def test_the_operator() -> None:
    x = torch.randn(3, 4) * 50
    torch.testing.assert_close(softcap(x, 30.0), 30 * torch.tanh(x / 30))
    torch.library.opcheck(torch.ops.softcap.softcap.default, (x, 30.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_export(dtype: torch.dtype, onnx_check: Any, expect_graph: Any) -> None:
    special = torch.tensor([[float("inf"), float("-inf"), float("nan"), -0.0]], dtype=dtype)
    program = onnx_check(
        lambda x: softcap(softcap(x, 30.0) + 1, 5.0),
        (torch.randn(2, 4, dtype=dtype) * 50,),
        dynamic_shapes=({0: "batch"},),
        opsets=(13, 18, 21),
        inputs=[(special,), (special[:0],)],
    )
    expect_graph(program, "onnxplug.softcap::Softcap Add onnxplug.softcap::Softcap")
    assert program.model.opset_imports["onnxplug.softcap"] == 1
    (function,) = program.model.functions.values()
    assert [node.op_type for node in function] == ["Div", "Tanh", "Mul"]


def test_without_the_plugin() -> None:
    with pytest.raises(onnxplug.MissingRuleError, match="softcap::softcap"):
        onnxplug.to_onnx(lambda x: softcap(x, 30.0), (torch.randn(2),), plugins=[])
