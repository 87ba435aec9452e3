"""``x.set_(y)``: a tensor that takes the memory of another tensor, among them inputs and buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.errors import OnnxplugError
from tests.support.check import check


class Model(nn.Module):
    """A function of a module with two buffers, and of two tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.arange(12.0).reshape(3, 4))
        self.register_buffer("other", torch.ones(3, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(self, x, y)


def to_input(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y)
    return x + 1


def to_result(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y * 2)
    return x + 1


def to_view(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y[0])
    return x + 1


def to_turned(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y.t())
    return x @ y


def to_buffer(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(m.state)
    return x + y


def of_buffer(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    m.state.set_(y * x)
    return m.state + 1


def source_is_written_after(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y)
    y.add_(1)
    return x * 2


def target_is_written_after(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y)
    x.mul_(3)
    return y + 0


def target_is_written_before(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(5)
    x.set_(y)
    return x + 1


def part_of_target_is_written_after(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y)
    x[1:, 0] = 7
    return y.sum()


def old_view_keeps_the_old_memory(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    view = x[0]
    x.set_(y * 2)
    return view + x


def old_view_is_written(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    view = x[0]
    x.set_(y * 2)
    view.zero_()
    return view + x


def result_of_in_place_operator(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x.add_(1)
    z.set_(y)
    z.mul_(2)
    return x + 1


def twice(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y * 2)
    x.set_(x + 1)
    return x * 1


def exchanged(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x.detach()
    x.set_(y)
    y.set_(z)
    return x - y


def local(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    z.set_(y)
    z.add_(1)
    return z + x


def view_is_replaced(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    view = x.view(4, 3)
    view.set_(y.t())
    view.add_(1)
    return view + 1, x + 0


def what_may_be_a_view(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y.t().reshape(-1))
    return x * 2


def reshaped_source_is_written_after(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y.reshape(4, 3))
    y.add_(1)
    return x * 2


def turned_in_place(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y + 1)
    x.t_()
    return x @ y


def in_branch(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    def replaced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z.set_(y * 3)
        return z + 1

    return torch.cond(x.sum() > 0, replaced, lambda x, y: x + y, (x, y))


#: The outputs with new values of each model.
WRITTEN: dict[Callable[..., Any], list[str]] = {
    to_input: ["x_out"],
    to_result: ["x_out"],
    to_view: ["x_out"],
    to_turned: ["x_out"],
    to_buffer: ["x_out"],
    of_buffer: ["state_out"],
    source_is_written_after: ["x_out", "y_out"],
    target_is_written_after: ["x_out", "y_out"],
    target_is_written_before: ["x_out"],
    part_of_target_is_written_after: ["x_out", "y_out"],
    old_view_keeps_the_old_memory: ["x_out"],
    old_view_is_written: ["x_out"],
    result_of_in_place_operator: ["x_out", "y_out"],
    twice: ["x_out"],
    exchanged: ["x_out", "y_out"],
    local: ["y_out"],
    view_is_replaced: ["y_out"],
    what_may_be_a_view: ["x_out"],
    reshaped_source_is_written_after: ["x_out", "y_out"],
    turned_in_place: ["x_out"],
    in_branch: [],
}
X, Y = torch.randn(3, 4), torch.randn(3, 4)


@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_results_and_written_tensors(function: Callable[..., Any]) -> None:
    program = check(Model(function), X, Y, others=[(Y.abs() + 1, -X), (-Y.abs(), X)], verify=True)
    names = [value.name for value in program.model.graph.outputs]
    assert sorted(name for name in names if name.endswith("_out")) == WRITTEN[function]


@pytest.mark.parametrize(
    "function", [to_result, source_is_written_after, target_is_written_after], ids=lambda f: f.__name__
)
def test_dynamic_sizes(function: Callable[..., Any]) -> None:
    rows = {0: torch.export.Dim("n")}
    model = nn.Module()
    model.forward = lambda x, y: function(model, x, y)  # type: ignore[method-assign,assignment]
    check(model, X, Y, others=[(torch.randn(5, 4), torch.randn(5, 4))], dynamic=({**rows}, {**rows}))


def test_the_module_is_left_as_it_was() -> None:
    model = Model(of_buffer)
    onnxplug.to_onnx(model, (X, Y))
    assert torch.equal(model.state, torch.arange(12.0).reshape(3, 4))


def no_source(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_()
    return y + 1


def by_offset(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y, 0, (4, 3), (3, 1))
    return x + 1


def by_storage(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y.untyped_storage(), 0, (4, 3), (3, 1))
    return x + 1


def resized(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.set_(y)
    x.resize_(2, 2)
    return x + y.sum()


def data_assigned(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.data = y * 2
    return x + 1


def operand_of_branch(m: Model, x: torch.Tensor, y: torch.Tensor) -> Any:
    def replaced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.set_(y)
        return x + 1

    return torch.cond(x.sum() > 0, replaced, lambda x, y: x + y, (x, y))


@pytest.mark.parametrize(
    "function",
    [no_source, by_offset, by_storage, resized, data_assigned, operand_of_branch],
    ids=lambda f: f.__name__,
)
def test_refused_with_the_line(function: Callable[..., Any]) -> None:
    with pytest.raises(OnnxplugError) as error:
        onnxplug.to_onnx(Model(function), (X, Y))
    assert f"{Path(__file__).name}:" in str(error.value)
