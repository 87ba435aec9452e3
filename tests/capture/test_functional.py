"""In-place operators made functional: the same results, state handed out, by our own pass wherever it can do it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.capture.capture import capture
from onnxplug.capture.functional import prepare
from tests.support.check import Call, check

X = torch.randn(3, 4)


def add_(x: torch.Tensor) -> Any:
    y = x * 1
    y.add_(1)
    return y * 2


def chained(x: torch.Tensor) -> Any:
    return (x + 0).mul_(2).add_(1).relu_().clamp_(max=2)


def old_value_is_kept(x: torch.Tensor) -> Any:
    y = x + 1
    z = y * 3
    y.zero_()
    return y, z


def promotes(x: torch.Tensor) -> Any:
    y = x + 0
    y.add_(torch.ones(4, dtype=torch.float64))
    return y


def fill(x: torch.Tensor) -> Any:
    return (x + 0).fill_(2.5), (x + 1).masked_fill_(x > 0, 7)


def index_put(x: torch.Tensor) -> Any:
    y = x + 0
    y.index_put_((torch.tensor([0, 2]),), torch.zeros(4))
    return y


def copy_(x: torch.Tensor) -> Any:
    y = x + 0
    y.copy_(torch.arange(4))
    return y


def slice_assigned(x: torch.Tensor) -> Any:
    y = x.clone()
    y[:, 0] = 5
    y[1:, 2:] = y[:-1, :2] * 2
    return y


def view_then_mutation(x: torch.Tensor) -> Any:
    y = x + 1
    view = y.view(-1)
    y.mul_(3)
    return view + 1, y


def mutation_then_view(x: torch.Tensor) -> Any:
    y = x + 1
    y.mul_(3)
    return y.view(-1), y


def mutated_view(x: torch.Tensor) -> Any:
    y = x + 1
    y.t().add_(1)
    return y


def reshape_then_mutation(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.reshape(2, 6)
    z.add_(1)
    return y, z


LINEAR: list[Callable[..., Any]] = [
    add_,
    chained,
    old_value_is_kept,
    promotes,
    fill,
    index_put,
    copy_,
    mutation_then_view,
]
ALIASED: list[Callable[..., Any]] = [slice_assigned, view_then_mutation, mutated_view, reshape_then_mutation]


@pytest.mark.parametrize("function", [*LINEAR, *ALIASED], ids=lambda f: f.__name__)
def test_results(function: Callable[..., Any]) -> None:
    check(function, X, others=[(torch.randn(3, 4),)])


@pytest.mark.parametrize("function", LINEAR, ids=lambda f: f.__name__)
def test_the_linear_pass_is_enough(function: Callable[..., Any]) -> None:
    assert prepare(capture(Call(function), (X,))).strategy == "linear"


@pytest.mark.parametrize("function", ALIASED, ids=lambda f: f.__name__)
def test_aliasing_goes_to_torch(function: Callable[..., Any]) -> None:
    assert prepare(capture(Call(function), (X,))).strategy == "functionalized"


def test_nothing_mutates_nothing_is_copied() -> None:
    captured = capture(nn.Linear(4, 2).eval(), (X,))
    functional = prepare(captured)
    assert functional.strategy == "unchanged"
    assert functional.graph is captured.program.graph


def test_inplace_relu_takes_the_linear_pass() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten()).eval()
    assert prepare(capture(model, (torch.randn(1, 1, 5, 5),))).strategy == "linear"


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.last.copy_(x)
        return x * self.count.sum()


def test_mutated_buffers_come_out() -> None:
    program = onnxplug.to_onnx(Counter(), (X,), verify=True)
    assert [v.name for v in program.model.graph.outputs] == ["output", "count_out", "last_out"]
    results = program(X)
    torch.testing.assert_close(results[1], torch.ones(2))
    torch.testing.assert_close(results[2], X)
    assert prepare(capture(Counter(), (X,))).strategy == "linear"


def test_mutated_inputs_come_out() -> None:
    def model(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.mul_(2)
        return x + cache

    program = onnxplug.to_onnx(model, (X, torch.ones(3, 4)), verify=True)
    assert [v.name for v in program.model.graph.outputs] == ["output", "cache_out"]
    torch.testing.assert_close(program(X, torch.ones(3, 4))[1], torch.full((3, 4), 2.0))


def test_slice_of_a_cache_input() -> None:
    def model(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, 1] = x
        return cache.sum(0)

    program = onnxplug.to_onnx(model, (torch.randn(3), torch.ones(3, 4)), verify=True)
    assert program.model.graph.outputs[1].name == "cache_out"


def test_no_grad_inside_forward() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return y + 1

    check(model, X, others=[(torch.randn(3, 4),)])


def test_cond() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2 - x.mean(), (x,))

    program = check(model, X.abs(), others=[(-X.abs(),)])
    assert "If" in [node.op_type for node in program.model.graph]


def test_training_statistics_leave_the_module_alone() -> None:
    module = Counter()
    before = copy.deepcopy(module.state_dict())
    onnxplug.to_onnx(module, (X,), verify=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name])
