"""Custom operators of every shape, with real torch.library operators."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest
import torch

import onnxplug
from onnxplug import Rule
from onnxplug.testing import IsolatedRegistry
from tests.support.check import check
from tests.support.tolerances import looser

X = torch.randn(3, 4)
OTHERS = [(torch.randn(5, 4) * 3,), (torch.randn(1, 4),)]
DYNAMIC = [{0: "n"}]


# -- functional --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("shapes::everything", mutates_args=())
def everything(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weights: Sequence[float],
    flag: bool,
    mode: str,
    dtype: torch.dtype,
    scale: float = 1.0,
    names: str | None = None,
) -> torch.Tensor:
    y = (x * sum(weights) * scale).to(dtype)
    y = y + bias.to(dtype) if bias is not None else y
    return -y if flag and mode == "negate" else y * 1


@everything.register_fake
def _(x, bias, weights, flag, mode, dtype, scale=1.0, names=None):
    return torch.empty_like(x, dtype=dtype)


def convert_everything(g: Any, node: Any) -> Any:
    x, bias, weights, flag, mode, dtype, scale, names = node.args
    assert isinstance(flag, bool)
    assert isinstance(mode, str)
    assert isinstance(dtype, torch.dtype)
    assert isinstance(scale, float), "a float given as an int is a float"
    assert all(isinstance(w, float) for w in weights)
    assert names is None
    y = g.cast(g.op.Mul(x, sum(weights) * scale), dtype)
    if bias is not None:
        y = g.op.Add(y, g.cast(bias, dtype))
    return g.op.Neg(y) if flag and mode == "negate" else y


def test_every_kind_of_argument() -> None:
    bias = torch.randn(4)

    def model(x: torch.Tensor) -> Any:
        result = everything(x, None, [1, 2], False, "a", torch.float64, 2)
        two = everything(x, bias, [0.5], True, "negate", dtype=torch.float32)
        return result, two

    check(
        model,
        X,
        others=OTHERS,
        dynamic=DYNAMIC,
        rules=[Rule("shapes::everything", convert_everything)],
        rtol=1e-6,
        atol=1e-6,
    )


# -- mutating ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("shapes::fill_with", mutates_args={"out"})
def fill_with(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@fill_with.register_fake
def _(x, out):
    return None


@torch.library.custom_op("shapes::add_and_sum", mutates_args={"acc"})
def add_and_sum(acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    acc.add_(x)
    return acc.sum()


@add_and_sum.register_fake
def _(acc, x):
    return x.new_empty(())


@torch.library.custom_op("shapes::swap", mutates_args={"a", "b"})
def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    copy = a.clone()
    a.copy_(b)
    b.copy_(copy)


@swap.register_fake
def _(a, b):
    return None


@torch.library.custom_op("shapes::scale_all", mutates_args={"xs"})
def scale_all(xs: list[torch.Tensor], factor: float) -> None:
    for x in xs:
        x.mul_(factor)


@scale_all.register_fake
def _(xs, factor):
    return None


def convert_fill_with(g: Any, node: Any) -> Any:
    x, _ = node.args
    return [g.op.Mul(x, 2.0)]


def convert_add_and_sum(g: Any, node: Any) -> Any:
    acc, x = node.args
    new = g.op.Add(acc, x)
    return [g.op.ReduceSum(new, keepdims=0), new]


def convert_swap(g: Any, node: Any) -> Any:
    a, b = node.args
    return [g.op.Add(b, 0.0), g.op.Add(a, 0.0)]


def convert_scale_all(g: Any, node: Any) -> Any:
    xs, factor = node.args
    return [[g.op.Mul(x, factor) for x in xs]]


MUTATING = [
    Rule("shapes::fill_with", convert_fill_with),
    Rule("shapes::add_and_sum", convert_add_and_sum),
    Rule("shapes::swap", convert_swap),
    Rule("shapes::scale_all", convert_scale_all),
]


def _fills(x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    fill_with(x, out)
    return out + 1


def _accumulates(x: torch.Tensor) -> Any:
    acc = x * 1
    first = add_and_sum(acc, x)
    second = add_and_sum(acc, x)
    return acc, first, second


def _swaps(x: torch.Tensor) -> Any:
    a, b = x + 1, x * 2
    swap(a, b)
    return a - b, b


def _scales(x: torch.Tensor) -> Any:
    a, b = x + 1, x * 2
    scale_all([a, b], 3)
    return a + b


def _writes_a_view(x: torch.Tensor) -> Any:
    base = torch.zeros(x.shape[0], 4)
    fill_with(x[:, :2], base[:, 1:3])
    return base


def _writes_a_dynamic_view(x: torch.Tensor) -> Any:
    base = torch.zeros(x.shape[0] + 2, 4)
    fill_with(x, base[1 : x.shape[0] + 1])
    column = torch.zeros(4, x.shape[0])
    fill_with(x, column.t())
    return base, column


@pytest.mark.parametrize("model", [_fills, _accumulates, _swaps, _scales, _writes_a_view, _writes_a_dynamic_view])
def test_mutating(model: Any) -> None:
    check(model, X, others=OTHERS, dynamic=DYNAMIC, rules=MUTATING)


@pytest.mark.parametrize("nested", [False, True])
def test_a_list_of_one_and_of_two(nested: bool) -> None:
    """A converter may return the new values of a list as a list, or one after the other."""

    def convert(g: Any, node: Any) -> Any:
        (values,) = convert_scale_all(g, node)
        return [values] if nested else values

    def model(x: torch.Tensor) -> Any:
        a, b = x + 1, x * 2
        scale_all([a], 3)
        scale_all([a, b], 2)
        return a, b

    check(model, X, others=OTHERS, dynamic=DYNAMIC, rules=[Rule("shapes::scale_all", convert)])


def test_a_mutated_buffer_and_input_come_out() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = add_and_sum(self.total, x)
            fill_with(self.total, x)
            return result

    program = onnxplug.to_onnx(Counts(), (X.clone(),), rules=MUTATING)
    assert [v.name for v in program.model.graph.outputs][1:] == ["total_out", "x_out"]
    result, total, x = program(X)
    torch.testing.assert_close(result, X.sum())
    torch.testing.assert_close(total, X)
    torch.testing.assert_close(x, X * 2)


def test_a_mutating_operator_without_a_rule_is_named() -> None:
    with pytest.raises(onnxplug.MissingRuleError) as caught:
        onnxplug.to_onnx(_fills, (X,))
    assert "shapes::fill_with" in str(caught.value)
    assert "test_custom_ops.py" in str(caught.value)


# -- lists -------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("shapes::spread", mutates_args=())
def spread(xs: Sequence[torch.Tensor], n: int) -> list[torch.Tensor]:
    return [x * (i + n) for i, x in enumerate(xs)]


@spread.register_fake
def _(xs, n):
    return [torch.empty_like(x) for x in xs]


@torch.library.custom_op("shapes::maybe", mutates_args=())
def maybe(x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x + sum(o for o in others if o is not None), [x * 2, x * 3]


@maybe.register_fake
def _(x, others):
    return torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]


def test_lists_in_and_out() -> None:
    def convert_spread(g: Any, node: Any) -> Any:
        xs, n = node.args
        return [g.op.Mul(x, float(i + n)) for i, x in enumerate(xs)]

    def convert_maybe(g: Any, node: Any) -> Any:
        x, others = node.args
        assert others[1] is None
        total = x
        for other in others:
            total = total if other is None else g.op.Add(total, other)
        return total, [g.op.Mul(x, 2.0), g.op.Mul(x, 3.0)]

    def model(x: torch.Tensor) -> Any:
        a, b, c = spread([x, x + 1, x[:1]], 2)
        total, parts = maybe(a, [b, None, b])
        return total, parts[1], c

    rules = [Rule("shapes::spread", convert_spread), Rule("shapes::maybe", convert_maybe)]
    check(model, X, others=OTHERS, dynamic=DYNAMIC, rules=rules)


# -- symbolic ints -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("shapes::tile_to", mutates_args=())
def tile_to(x: torch.Tensor, n: int, sizes: Sequence[int]) -> torch.Tensor:
    return x.new_ones(list(sizes)) * x.sum() * n


@tile_to.register_fake
def _(x, n, sizes):
    return x.new_empty(list(sizes))


def test_dynamic_sizes_are_inputs() -> None:
    def convert(g: Any, node: Any) -> Any:
        x, n, sizes = node.args
        assert isinstance(n, ir.Value)
        assert [isinstance(s, ir.Value) for s in sizes] == [True, False]
        total = g.op.Mul(g.op.ReduceSum(x, keepdims=0), g.cast(n, x.dtype))
        return g.op.Expand(total, g.vector(sizes))

    def model(x: torch.Tensor) -> torch.Tensor:
        return tile_to(x, x.shape[0] * 2, [x.shape[0] + 1, 2])

    check(model, X, others=OTHERS, dynamic=DYNAMIC, rules=[Rule("shapes::tile_to", convert)], **looser("properties"))


# -- composite operators, and operators within operators ---------------------------------------------------------------

LIB = torch.library.Library("shapes_composite", "DEF")
LIB.define("outer(Tensor x) -> Tensor")
LIB.define("inner(Tensor x) -> Tensor")
LIB.define("leaf(Tensor x) -> Tensor")
LIB.impl("leaf", lambda x: x * 3, "CompositeExplicitAutograd")
LIB.impl("inner", lambda x: torch.ops.shapes_composite.leaf(x) + 1, "CompositeImplicitAutograd")
LIB.impl("outer", lambda x: torch.ops.shapes_composite.inner(x) * 2, "CompositeImplicitAutograd")


def _leaf(g: Any, node: Any) -> Any:
    return g.op.Mul(node.args[0], 3.0)


@pytest.mark.parametrize(
    ("claimed", "wanted"),
    [
        (["leaf"], "Mul Add Mul"),
        (["leaf", "inner"], "Sigmoid Mul"),
        (["leaf", "inner", "outer"], "Tanh"),
    ],
)
def test_a_composite_operator_is_kept_where_a_rule_claims_it(
    claimed: list[str], wanted: str, expect_graph: Any
) -> None:
    convert = {
        "leaf": _leaf,
        "inner": lambda g, node: g.op.Sigmoid(node.args[0]),
        "outer": lambda g, node: g.op.Tanh(node.args[0]),
    }
    rules = [Rule(f"shapes_composite::{name}", convert[name]) for name in claimed]
    program = onnxplug.to_onnx(lambda x: torch.ops.shapes_composite.outer(x), (X,), rules=rules)
    expect_graph(program, wanted)
    if claimed == ["leaf"]:
        check(lambda x: torch.ops.shapes_composite.outer(x), X, others=OTHERS, dynamic=DYNAMIC, rules=rules)


def test_an_operator_within_another_is_named_with_it() -> None:
    with pytest.raises(onnxplug.MissingRuleError) as caught:
        onnxplug.to_onnx(lambda x: torch.ops.shapes_composite.outer(x), (X,))
    assert list(caught.value.missing) == ["shapes_composite::outer.default"]
    assert "its decomposition needs shapes_composite::leaf.default" in str(caught.value)


def test_an_operator_reached_through_a_plugins_decomposition(expect_graph: Any) -> None:
    """Only the decomposition that a plugin states leads to the operator that has a rule."""
    library = torch.library.Library("shapes_within", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x * 3 + 1, "CompositeExplicitAutograd")

    plugin = ModuleType("onnxplug_within")
    decompositions = {"shapes_within::opaque.default": lambda x: torch.ops.shapes_composite.leaf(x) + 1}
    plugin.onnxplug_decompositions = onnxplug.hookimpl(lambda: decompositions)  # type: ignore[attr-defined]
    plugin.onnxplug_rules = onnxplug.hookimpl(lambda: [Rule("shapes_composite::leaf", _leaf)])  # type: ignore[attr-defined]
    registry = IsolatedRegistry()
    registry.add_plugin(plugin, distribution="onnxplug-within")
    with registry.active():
        program = check(lambda x: torch.ops.shapes_within.opaque(x), X, others=OTHERS, dynamic=DYNAMIC)
    expect_graph(program, "Mul Add")


# -- triton ------------------------------------------------------------------------------------------------------------


def test_triton_op(expect_graph: Any) -> None:
    """triton_op is a custom operator whose body may launch kernels; the declaration itself needs no GPU."""
    pytest.importorskip("torch.utils._triton")

    @torch.library.triton_op("shapes::tripled", mutates_args={})
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    rules = [Rule("shapes::tripled", lambda g, node: g.op.Mul(node.args[0], 3.0))]
    program = check(lambda x: tripled(x) + 1, X, others=OTHERS, dynamic=DYNAMIC, rules=rules)
    expect_graph(program, "Mul Add")
    # Its body is made of operators that torch knows, so that it is decomposed where no rule claims it.
    check(lambda x: tripled(x) + 1, X, others=OTHERS, dynamic=DYNAMIC)
