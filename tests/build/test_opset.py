"""How converters call operators."""

from __future__ import annotations

import pytest
import torch

import onnxplug
from onnxplug.errors import UsageError


@pytest.mark.parametrize("name", ["Tanh", "com.acme::Tanh"])
def test_the_form_of_symbolic_functions_is_named(name: str) -> None:
    rule = onnxplug.Rule("aten::sin.default", lambda g, node: g.op(name, node.args[0]))
    with pytest.raises(UsageError) as info:
        onnxplug.to_onnx(torch.sin, (torch.randn(3),), rules=[rule])
    assert info.value.hint == "Write g.op.Tanh(...)."
