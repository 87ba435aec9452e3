"""In-place operators made functional: the same results and new state, by our own pass wherever it can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.capture.capture import capture
from onnxplug.functionalize.prepare import prepare
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


def items_of_a_list(x: torch.Tensor) -> Any:
    y = x + 1
    first, *rest = y.unbind(0)
    left, right = y.split([1, 3], 1)
    first.mul_(2)
    right[1].add_(first[:3])
    return y, first, rest, left.add_(1), right


def one_of_several_results(x: torch.Tensor) -> Any:
    values, indices = x.max(1)
    values.add_(1)
    return values, indices


def turned_in_place(x: torch.Tensor) -> Any:
    y = x + 1
    row = y[1]
    y.t_()
    y[0] = 7
    return y, row, y.unsqueeze_(0) + 1


def copied_by_a_cast(x: torch.Tensor) -> Any:
    y = x + 1
    wide = y.to(torch.float64)
    y.zero_()
    return y, wide


def diagonal(x: torch.Tensor) -> Any:
    y = x + 1
    y.diagonal().fill_(0)
    y[..., None, 1] = 5
    y.permute(1, 0)[-1] *= 3
    return y


def product_written(x: torch.Tensor) -> Any:
    y = torch.einsum("ij,kl->ik", x, x + 1)
    y.div_(2)
    return y


def dropout_outside_of_training(x: torch.Tensor) -> Any:
    """It returns what it is given, which the write changes too."""
    y = x + 1
    z = nn.functional.dropout(y, 0.5, training=False)
    z += 1
    return y, z


LINEAR: list[Callable[..., Any]] = [
    product_written,
    dropout_outside_of_training,
    add_,
    chained,
    old_value_is_kept,
    promotes,
    fill,
    index_put,
    copy_,
    mutation_then_view,
    slice_assigned,
    view_then_mutation,
    mutated_view,
    items_of_a_list,
    one_of_several_results,
    turned_in_place,
    copied_by_a_cast,
    diagonal,
]


def written_after_a_reshape(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.reshape(2, 6)
    y.add_(1)
    return y, z


def written_after_an_einsum(x: torch.Tensor) -> Any:
    y = x + 1
    z = torch.einsum("ij->ji", y)
    y.add_(1)
    return y, z


LINEAR += [reshape_then_mutation, written_after_a_reshape, written_after_an_einsum]


@pytest.mark.parametrize("function", LINEAR, ids=lambda f: f.__name__)
def test_results(function: Callable[..., Any]) -> None:
    check(function, X, others=[(torch.randn(3, 4),)])


@pytest.mark.parametrize("function", LINEAR, ids=lambda f: f.__name__)
def test_the_linear_pass_is_enough(function: Callable[..., Any]) -> None:
    assert prepare(capture(Call(function), (X,))).strategy == "linear"


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


@pytest.mark.parametrize("batch", [2, 5])
def test_writes_of_dynamic_sizes(batch: int) -> None:
    def model(x: torch.Tensor) -> Any:
        y = x * 1
        y.view(-1).add_(1)
        y[1:, 0] = y.sum(0)[1]
        y.unsqueeze(0).squeeze().mul_(2)
        return y, y[-1].clone()

    shape = ({0: torch.export.Dim.AUTO},)
    assert prepare(capture(Call(model), (torch.randn(3, 4),), dynamic_shapes=(shape,))).strategy == "linear"
    check(model, torch.randn(3, 4), others=[(torch.randn(batch, 4),), (torch.randn(batch + 1, 4) * 9,)], dynamic=shape)


class Region(nn.Module):
    """Writes what is outside of it, under another mode."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        with torch.no_grad() if self.mode == "no_grad" else torch.autocast("cpu", enabled=False):
            y[0] = 3
            z = y * 2
            with torch.no_grad():
                y.add_(z.detach())
        return y + 1, z


@pytest.mark.parametrize("mode", ["no_grad", "autocast"])
@pytest.mark.parametrize("is_input", [True, False])
def test_regions_that_write_outer_tensors(mode: str, is_input: bool) -> None:
    model = Region(mode)
    program = torch.export.export(model, (X,)) if is_input else model
    exported = onnxplug.to_onnx(program, (X,))
    for x in (X, torch.randn(3, 4)):
        for got, wanted in zip(exported(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted.detach())


def test_branches_that_write() -> None:
    def written(y: torch.Tensor) -> torch.Tensor:
        z = y.clone()
        z.add_(1)
        z[0] = 3
        return z

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.mul_(2)
        return torch.cond(x.sum() > 0, written, lambda y: y * 2, (y,))

    check(model, X.abs(), others=[(-X.abs(),), (X.abs() + 1,)])
    assert prepare(capture(Call(model), (X,))).strategy == "linear"


def test_a_write_in_a_branch_is_not_dropped() -> None:
    """No capture makes an inner graph that writes its own input; a converter that inlines one gets an error."""
    inner = torch.fx.symbolic_trace(lambda y: torch.ops.aten.add_.Tensor(y, 1))

    def converter(g: Any, node: Any) -> Any:
        return g.interpreter.inline(inner, [node.args[0]])[0]

    with pytest.raises(onnxplug.ConversionError, match="writes its inputs in place"):
        onnxplug.to_onnx(lambda x: x.sin(), (X,), rules=[onnxplug.Rule("aten::sin", converter)])


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
