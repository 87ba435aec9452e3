"""torch.export's passes over a finished graph, left out where they change nothing: the program is torch.export's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from tests.support.patches import without
from tests.support.traces import captured, lines

X = torch.randn(3, 4)
SHAPES: Any = ({0: Dim.DYNAMIC},)


class Inner(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.function(x)) + x.shape[0]


def model(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Sequential(Inner(function), nn.ReLU()), Inner(function), Inner(torch.sin)).eval()


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return y + x


def with_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x * 2
        with torch.no_grad():
            y = y.exp()
    return y + x


def within_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, without_gradients, with_gradients, (x,))


def only_set(x: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)
    return x * 2


def from_a_generator(x: torch.Tensor) -> torch.Tensor:
    return sum((x * i for i in range(1, 3)), start=x)


@pytest.mark.parametrize(
    "function", [torch.cos, without_gradients, with_gradients, within_a_branch, only_set, from_a_generator]
)
def test_programs_are_those_of_torch(
    function: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, _ = captured(model(function), (X,), True, dynamic_shapes=SHAPES)
    without(monkeypatch, "lean tracing")
    plain, _ = captured(model(function), (X,), False, dynamic_shapes=SHAPES)
    for line, other in zip(lines(traced.program), lines(plain.program), strict=True):
        assert line == other


def test_no_code_is_made_of_a_graph_that_nobody_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    python_code = torch.fx.Graph.python_code

    def counted(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
        made.append(str(graph))
        return python_code(graph, *args, **kwargs)

    monkeypatch.setattr(torch.fx.Graph, "python_code", counted)
    captured(model(torch.cos), (X,), True, dynamic_shapes=SHAPES)
    assert not made


def test_a_program_runs_is_read_and_copied() -> None:
    module = model(without_gradients)()
    traced, _ = captured(lambda: module, (X,), True, dynamic_shapes=SHAPES)
    graph_module, other = traced.program.graph_module, torch.randn(5, 4)
    assert "torch.ops.aten.linear.default" in graph_module.code
    assert "linear" in str(graph_module)
    for again in (graph_module, copy.deepcopy(graph_module)):
        state = [
            traced.program.state_dict[name] for name in traced.program.graph_signature.inputs_to_parameters.values()
        ]
        assert torch.equal(again(*state, other)[0], module(other))
    assert torch.equal(traced.program.module()(other), module(other))


@pytest.mark.parametrize("function", [without_gradients, with_gradients])
def test_numbers(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    onnxplug.to_onnx(model(function)(), (X,), dynamic_shapes=SHAPES, verify=True)
