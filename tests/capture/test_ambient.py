"""Exports under the autocast of the caller."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import onnxplug
from tests.support.tolerances import looser

X, OTHER = torch.randn(3, 4), torch.randn(5, 4) * 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        self.calls += 1
        y = self.linear(x) * scale
        return y, torch.einsum("ij,kj->ik", y, self.linear.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_callers_autocast_is_exported(dtype: torch.dtype) -> None:
    model = Model().eval()
    with torch.autocast("cpu", dtype=dtype):
        program = onnxplug.to_onnx(model, (X,), kwargs={"scale": 2.0}, dynamic_shapes={"x": {0: "n"}}, verify=True)
        assert torch.is_autocast_enabled("cpu")
        expected = [[y.detach() for y in copy.deepcopy(model)(x, scale=2.0)] for x in (X, OTHER)]
    assert not torch.is_autocast_enabled("cpu")
    assert {"linear.weight", "linear.bias"} <= set(program.model.graph.initializers)
    for x, (first, second) in zip((X, OTHER), expected, strict=True):
        results = program(x, scale=2.0)
        for ours, theirs in zip(results, (first, second), strict=False):
            assert ours.dtype is theirs.dtype is dtype
            torch.testing.assert_close(ours, theirs, **looser("autocast"))
    assert program.verify().cases  # where no autocast is on


def test_a_forward_of_the_instance() -> None:
    model = torch.nn.Linear(4, 4)
    model.forward = lambda x: torch.relu(torch.nn.functional.linear(x, model.weight))  # type: ignore[method-assign]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = onnxplug.to_onnx(model, (X,), verify=True)
        torch.testing.assert_close(program(X)[0], model(X).detach(), **looser("autocast"))
    assert vars(model)["forward"]
    with torch.autocast("cpu", enabled=False):
        assert onnxplug.to_onnx(model, (X,), verify=True).statistics.decomposed == ()
