"""Kinds of writes that our own pass makes functional, without a second trace: each is compared with eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug import Rule
from onnxplug.capture.capture import capture
from onnxplug.functionalize.prepare import prepare
from tests.support.check import Call, check
from tests.support.tolerances import looser

X = torch.randn(3, 4)
IMAGES = torch.randn(4, 3, 5, 5)
ROWS_AND_COLUMNS = ({0: Dim("n"), 1: Dim("m")},)


def strategy(model: Callable[..., Any], *args: Any, dynamic: Any = None) -> str:
    """The strategy that makes a model's writes functional."""
    module = model if isinstance(model, nn.Module) else Call(model)
    shapes = (dynamic,) if dynamic is not None and isinstance(module, Call) else dynamic
    return prepare(capture(copy.deepcopy(module), args, dynamic_shapes=shapes)).strategy


# -- what is a view or a copy by its strides ---------------------------------------------------------------------------


def reshape_gives_a_view(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.reshape(2, 6)
    z.add_(1)
    y[0].mul_(3)
    return y, z


def reshape_gives_a_copy(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.t().reshape(2, 6)
    z.add_(1)
    y.mul_(2)
    return y, z


def contiguous_gives_itself(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.contiguous()
    z.add_(1)
    y.unsqueeze_(0)
    return y, z


def contiguous_gives_a_copy(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.t().contiguous()
    z.add_(1)
    return y, z


def channels_last(x: torch.Tensor) -> Any:
    y = (x + 1).view(1, 3, 2, 2)
    z = y.contiguous(memory_format=torch.channels_last)
    w = z.contiguous(memory_format=torch.channels_last)
    z.add_(1)
    w[:, 0] = 5
    return y, z, w


def flattened(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.flatten()
    z[2] = 1
    y.ravel()[1] = 9
    y.t().flatten()[0] = 100
    return y, z


def converted(x: torch.Tensor) -> Any:
    y = x + 1
    z, copied = y.to(torch.float32), y.to(torch.float32, copy=True)
    z.add_(1)
    y.float().mul_(2)
    y.double().fill_(0)
    copied[0] = 0
    return y, z, copied, y.type_as(x).relu_()


def permuted_by_einsum(x: torch.Tensor) -> Any:
    y = x + 1
    z = torch.einsum("ij->ji", y)
    y.add_(1)
    z[0] = 4
    return y, z


def indices_of_a_reshaped_tensor(x: torch.Tensor) -> Any:
    y = x + 1
    y.reshape(-1)[torch.tensor([0, 5])] = 3
    y[1:][torch.tensor([0, 1]), torch.tensor([1, 2])] = 5
    return y


def input_reshaped(x: torch.Tensor) -> Any:
    x.reshape(-1)[3] = 2
    return x + 1


def of_higher_rank(x: torch.Tensor) -> Any:
    y = x[0] + 1
    torch.atleast_3d(y).add_(1)
    return y


def copy_whose_source_is_not_read_again(x: torch.Tensor) -> Any:
    """Whether it is a copy doesn't matter."""
    y = (x + 1).t().reshape(-1)
    y.add_(1)
    y.mul_(2)
    return y


# -- views ---------------------------------------------------------------------------------------------------------------


def parts(x: torch.Tensor) -> Any:
    y = x + 1
    a, b = y.chunk(2, 1)
    c, d, e = y.tensor_split(3, 1)
    f, _ = y.hsplit(2)
    g = y.vsplit([1])[1]
    a.add_(1)
    b[0] = 2
    d.mul_(3)
    f[:, 0] = 7
    g.sub_(4)
    return y, a, b, c, d, e, f, g


def expanded_without_repetition(x: torch.Tensor) -> Any:
    y = x + 1
    y.expand(3, 4).add_(1)
    y[None].expand(1, 3, 4)[0, 1].mul_(2)
    return y, y.expand(2, 3, 4)


def strided(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.as_strided((2, 2), (1, 4), 1)
    z.add_(1)
    y.mul_(2)
    return y, z


def parts_of_complex_numbers(x: torch.Tensor) -> Any:
    y = torch.complex(x, x)
    y.real.add_(1)
    y.imag[0] = 3
    torch.view_as_real(y)[..., 1].mul_(2)
    y.real[1:].zero_()
    return torch.view_as_real(y), y.real.real.add_(2)


def moved_axes(x: torch.Tensor) -> Any:
    y = x + 1
    y.moveaxis(0, 1)[0] = 3
    y.mH[1].add_(2)
    y.adjoint().mul_(2)
    return y


# -- operators -----------------------------------------------------------------------------------------------------------


def results_of_inputs(x: torch.Tensor) -> Any:
    y, part = torch.empty_like(x), torch.zeros(5, 4)
    torch.add(x, 1, out=y)
    torch.mul(x, 2, out=part[1:4])
    values, indices = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int64)
    result = torch.sort(x, 1, out=(values, indices))
    values.add_(1)
    stacked = torch.empty(0)
    torch.stack([x, y], out=stacked)
    wide = torch.empty(3, 4, dtype=torch.float64)
    torch.add(x, 1, out=wide)
    return y * 2, part, result, indices, stacked, wide


def lists(x: torch.Tensor) -> Any:
    a, b = x + 1, x * 2
    torch._foreach_add_([a, b[0]], 1.0)
    torch._foreach_mul_([a, b], [a * 1, b * 1])
    torch._foreach_sqrt_([a[1:]])
    torch._foreach_add_([a, b], [x, x], alpha=2)
    torch._foreach_mul_([a, b], [2.0, 3.0])
    return a, b


def composites(x: torch.Tensor) -> Any:
    y = x * 10
    y[1:].fill_diagonal_(3)
    flags = x > 0
    flags &= x < 1
    flags[0] |= True
    y.absolute_().clip_(0, 5)
    nn.functional.rrelu(y, training=False, inplace=True)
    nn.functional.dropout(y, 0.0, training=True, inplace=True)
    nn.functional.selu(y, inplace=True)
    return y, flags


def without_effect(x: torch.Tensor) -> Any:
    y, z, half = x + 1, x + 2, (x + 3).half()
    y.dequantize().add_(1)
    nn.functional.dropout(z, 0.0, training=True).mul_(2)
    half.dequantize().add_(1)
    return y, z, half


def comparisons(x: torch.Tensor) -> Any:
    y, numbers = x.flip(0), (x * 2).int()
    results = [x.clone().gt_(0.5), x.clone().less_equal_(y), x.clone().logical_not_(), numbers.clone().eq_(1)]
    results += [numbers.clone().logical_and_(numbers.flip(0)), numbers.clone().cumsum_(0)]
    rows = x + 1
    rows[1:].ge_(1)
    return [result * 2 for result in results], rows


def result_of_a_branch(x: torch.Tensor) -> Any:
    y = x * 1
    y[0].add_(1)
    z = torch.cond(x.sum() > 0, lambda a: a.view(-1) * 2, lambda a: a.view(-1) + 1, (y,))
    z.add_(1)
    y.mul_(2)
    return z, y


FUNCTIONS: list[Callable[..., Any]] = [
    reshape_gives_a_view,
    reshape_gives_a_copy,
    contiguous_gives_itself,
    contiguous_gives_a_copy,
    channels_last,
    flattened,
    converted,
    permuted_by_einsum,
    indices_of_a_reshaped_tensor,
    input_reshaped,
    of_higher_rank,
    copy_whose_source_is_not_read_again,
    parts,
    expanded_without_repetition,
    strided,
    parts_of_complex_numbers,
    moved_axes,
    results_of_inputs,
    lists,
    composites,
    without_effect,
    comparisons,
    result_of_a_branch,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(function: Callable[..., Any]) -> None:
    assert strategy(function, X) == "linear"
    check(function, X, others=[(torch.randn(3, 4),), (-X.abs(),)])


def test_random_operators() -> None:
    def model(x: torch.Tensor) -> Any:
        y, z, b = x + 1, x + 1, x + 1
        y[1:].uniform_(2, 3)
        z.normal_()
        b.bernoulli_(0.5)
        return y, ((b == 0) | (b == 1)).all(), (z == x + 1).any()

    assert strategy(model, X) == "linear"
    y, drawn, kept = onnxplug.to_onnx(model, (X,))(X)
    assert torch.equal(y[0], X[0] + 1)
    assert ((y[1:] >= 2) & (y[1:] <= 3)).all()
    assert drawn
    assert not kept


# -- running statistics --------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """Statistics in a row of a buffer, outside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(2, 3))
        self.register_buffer("variances", torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = nn.functional.batch_norm(x, self.means[1], self.variances[0], training=True)
        return y + self.means.sum()


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x) + self.norm(x * 2 + 1)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(3),
    "batch norm without affine": lambda: nn.BatchNorm2d(3, affine=False),
    "batch norm in float64": lambda: nn.BatchNorm2d(3).double(),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "instance norm without affine": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_training(name: str) -> None:
    model = Twice(NORMS[name]()).train()
    images = IMAGES.double() if "64" in name else IMAGES
    assert strategy(model, images) == "linear"
    dynamic = ({0: Dim("n", min=2)},)
    program = check(model, images, others=[(images[:2] * 3,), (images + 1,)], dynamic=dynamic, **looser("properties"))
    names = {value.name for value in program.model.graph.outputs}
    assert {"norm.running_mean_out", "norm.running_var_out"} <= names


@pytest.mark.parametrize("is_input", [True, False])
def test_statistics_that_are_views(is_input: bool) -> None:
    model = Statistics()
    assert strategy(model, IMAGES) == "linear"
    program = torch.export.export(model, (IMAGES,)) if is_input else model
    exported = onnxplug.to_onnx(program, (IMAGES,))
    assert [value.name for value in exported.model.graph.outputs] == ["output", "means_out", "variances_out"]
    eager = copy.deepcopy(model)
    wanted = eager(IMAGES * 2)
    for got, value in zip(exported(IMAGES * 2), (wanted, eager.means, eager.variances), strict=True):
        torch.testing.assert_close(got, value, **looser("properties"))


# -- operators of libraries ----------------------------------------------------------------------------------------------


@torch.library.custom_op("writes::grow", mutates_args={"xs", "total"})
def grow(
    xs: list[torch.Tensor],
    step: torch.Tensor,
    total: torch.Tensor,
    factor: float = 2.0,
    spare: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    for x in xs:
        x.add_(step)
    total.mul_(factor)
    return step.sum(), step * 2


@grow.register_fake
def _(xs, step, total, factor=2.0, spare=None):
    return step.new_empty(()), torch.empty_like(step)


def convert_grow(g: Any, node: Any) -> Any:
    xs, step, total, factor, _ = node.args
    own = [g.op.ReduceSum(step, keepdims=0), g.op.Mul(step, 2.0)]
    return [*own, [g.op.Add(x, step) for x in xs], g.op.Mul(total, factor)]


@torch.library.custom_op("writes::swap", mutates_args={"a", "b"})
def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


RULES = [
    Rule("writes::grow", convert_grow),
    Rule("writes::swap", lambda g, node: [g.op.Add(node.args[1], 0.0), g.op.Add(node.args[0], 0.0)]),
]


def lists_of_views(x: torch.Tensor) -> Any:
    a, b, c = x + 1, x * 2, x * 1
    total, twice = grow([a[:1], b[1:2]], x[:1], c.t(), spare=None)
    again, _ = grow([c], x[:1], total=a, factor=3.0)
    return a, b, c, total, twice, again


def two_rows(x: torch.Tensor) -> Any:
    y = x + 1
    swap(y[0], y[2])
    return y


def rows_of_an_input(x: torch.Tensor) -> Any:
    swap(x[0], x[1])
    return x * 2


@pytest.mark.filterwarnings("ignore:the model has none of the operators")
@pytest.mark.parametrize("function", [lists_of_views, two_rows, rows_of_an_input], ids=lambda f: f.__name__)
def test_operators_of_libraries(function: Callable[..., Any]) -> None:
    assert strategy(function, X) == "linear"
    check(function, X, others=[(torch.randn(3, 4),)], rules=RULES)


# -- dynamic sizes -------------------------------------------------------------------------------------------------------


def same_at_every_size(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.reshape(-1)
    z.add_(1)
    a, b = y.chunk(2, 1)
    b.mul_(2)
    y.narrow(0, 0, y.shape[0] - 1).sub_(1)
    y.view(-1, 1, y.shape[1]).flatten(0, 1)[0] = 3
    return y, z, a, b


def settled_by_the_first_axis(x: torch.Tensor) -> Any:
    """A view where ``n`` is 1."""
    y = x + 1
    z = y.transpose(0, 1).contiguous().view(-1, y.shape[0])
    w = y.unsqueeze(1).expand(-1, 2, -1).reshape(-1)
    y.add_(1)
    return y, z, w


def test_dynamic_sizes_of_which_nothing_depends() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*right only where.*")
        assert strategy(same_at_every_size, X, dynamic=ROWS_AND_COLUMNS) == "linear"
        others = [(torch.randn(2, 7),), (torch.randn(5, 8),), (torch.randn(1, 4),)]
        check(same_at_every_size, X, others=others, dynamic=ROWS_AND_COLUMNS)


def conditions_of(model: Callable[..., Any], dynamic: Any) -> list[str]:
    captured = capture(Call(model), (X,), dynamic_shapes=(dynamic,))
    before = len(captured.conditions)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert prepare(captured).strategy == "linear"
        prepare(captured)
    texts = [condition.text(captured.size_names()) for condition in captured.conditions[before:]]
    messages = [str(w.message) for w in caught if "right only where" in str(w.message)]
    assert len(messages) == len(texts)
    assert all(text in message for text, message in zip(texts, messages, strict=True))
    return texts


def test_sizes_at_which_a_copy_is_a_view_are_named() -> None:
    assert conditions_of(settled_by_the_first_axis, ({0: Dim("n")},)) == ["n != 1"]
    assert sorted(conditions_of(settled_by_the_first_axis, ROWS_AND_COLUMNS)) == ["m != 1", "n != 1"]
    assert conditions_of(settled_by_the_first_axis, ({0: Dim("n", min=2), 1: Dim("m", min=2)},)) == []
    assert conditions_of(settled_by_the_first_axis, ({0: Dim.DYNAMIC},)) == ["args_0.shape[0] != 1"]


def test_right_at_the_other_sizes() -> None:
    with pytest.warns(UserWarning, match=r"right only where n != 1"):
        check(
            settled_by_the_first_axis,
            X,
            others=[(torch.randn(2, 4),), (torch.randn(7, 4),)],
            dynamic=({0: Dim("n")},),
            verify=True,
        )


def test_no_condition_where_the_source_is_not_read_again() -> None:
    def model(x: torch.Tensor) -> Any:
        y = (x + 1).transpose(0, 1).contiguous()
        y.add_(1)
        return y

    assert conditions_of(model, ROWS_AND_COLUMNS) == []
    check(model, X, others=[(torch.randn(1, 4),), (torch.randn(5, 1),)], dynamic=ROWS_AND_COLUMNS)


# -- inputs that share memory --------------------------------------------------------------------------------------------


def test_inputs_of_the_example_that_share_memory() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return y * 2

    tensor = torch.randn(3, 4)
    for other in (tensor, tensor[1:]):
        with pytest.warns(UserWarning, match="writes its input 'x', which shares memory with 'y'"):
            onnxplug.to_onnx(model, (tensor, other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxplug.to_onnx(model, (tensor, tensor.clone()))
        onnxplug.to_onnx(lambda x, y: x + y, (tensor, tensor))


# -- what remains --------------------------------------------------------------------------------------------------------


def windows(x: torch.Tensor) -> Any:
    y = x + 1
    y.unfold(1, 2, 2).mul_(2)
    return y


def repeated(x: torch.Tensor) -> Any:
    y = x[:1] + 1
    y.expand(3, 4)[1].add_(1)
    return y


def dropouts(x: torch.Tensor) -> Any:
    y, z = x + 1, x + 2
    nn.functional.dropout(y, training=False).add_(1)
    nn.functional.dropout(z, 0.0, training=True).narrow(0, -1, 1).mul_(2)
    return y, z


def unsafe_splits(x: torch.Tensor) -> Any:
    a, b, c = x + 1, x + 2, x + 3
    torch.unsafe_split(a, 2)[0].add_(1)
    torch.unsafe_split_with_sizes(b, [1, 3], 1)[1].add_(1)
    torch.unsafe_chunk(c, 2, 1)[1].narrow(0, -1, 1).mul_(2)
    return a, b, c


def dequantized(x: torch.Tensor) -> Any:
    y, half = x + 1, (x + 2).half()
    y.dequantize().narrow(0, -1, 1).mul_(2)
    half.dequantize().narrow(0, -1, 1).mul_(2)
    return y, half


def dropout_in_a_branch(x: torch.Tensor) -> Any:
    def first(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        nn.functional.dropout(y, training=False).narrow(0, -1, 1).mul_(2)
        y.reshape(2, 6).add_(1)
        return y

    return torch.cond(x.sum() > 0, first, lambda x: x - 1, (x,))


@pytest.mark.parametrize(
    "function",
    [windows, repeated, dropouts, unsafe_splits, dequantized, dropout_in_a_branch],
    ids=lambda f: f.__name__,
)
def test_writes_that_go_to_torch(function: Callable[..., Any]) -> None:
    assert strategy(function, X) == "functionalized"
    check(function, X, others=[(torch.randn(3, 4),), (X.abs(),)])


class Normed(nn.Module):
    """A norm whose result is written in a way that goes to torch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        y.narrow(0, -1, 1).mul_(2)
        return y


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_training_that_go_to_torch(name: str) -> None:
    model = Normed(NORMS[name]()).train()
    images = IMAGES.double() if "64" in name else IMAGES
    assert strategy(model, images) == "functionalized"
    program = check(model, images, others=[(images + 1,)], **looser("properties"))
    names = {value.name for value in program.model.graph.outputs}
    assert {"norm.running_mean_out", "norm.running_var_out"} <= names


def test_the_program_stays_as_it_is() -> None:
    program = torch.export.export(Call(dropouts), (X,))
    before = str(program.graph)
    onnxplug.to_onnx(program)
    assert str(program.graph) == before
