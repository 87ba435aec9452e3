"""Calls as converters see them: unchangeable, made into other calls, and with restored surroundings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_over

import onnxplug
from onnxplug import Decline, Rule, UsageError
from tests.support.check import check

X = torch.randn(3, 4)


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for attr in node.attributes.values():
            if attr.type == ir.AttributeType.GRAPH:
                yield from all_nodes(attr.as_graph())


def after_a_branch(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2 - x.mean(), (x,)).exp()


def untouched_branch(x: torch.Tensor) -> Any:
    """A branch that returns its operand, another that returns a value twice."""
    y = x.sin()
    return torch.cond(x.sum() > 0, lambda y: (y.clone(), y + 1), lambda y: (y * 2, y * 2), (y,))


def branch_in_a_branch(x: torch.Tensor) -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 1, lambda x: x.exp(), lambda x: x - 1, (x,)) * 2

    return torch.cond(x.sum() > 0, inner, lambda x: x.abs(), (x,))


GRAPHS: dict[str, Callable[..., Any]] = {
    "cond": after_a_branch,
    "outputs of a branch": untouched_branch,
    "nested cond": branch_in_a_branch,
    "while_loop": lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1].exp(),
    "scan": lambda x: scan(lambda c, y: (c + y, c * y), torch.zeros(4), x)[1].exp(),
    "map": lambda x: map_over(lambda y: y.exp() + 1, x) * 2,
    "decomposition": lambda x: torch.ops.aten.addr(x, x[:, 0], x[0]).exp(),
    "one value twice": lambda x: (y := x.exp(), y),
    "an input": lambda x: (x, x.exp()),
    "complex": lambda x: torch.complex(x, x) * 1j,
    "into a slice": lambda x: x.clone().index_fill_(0, torch.tensor([0]), 2.0),
    "no element": lambda x: (x[:0].exp(), x.exp()),
}


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_has_its_metadata(name: str, optimize: bool) -> None:
    program = onnxplug.to_onnx(GRAPHS[name], (X,), optimize=optimize)
    bare = [node for node in all_nodes(program.model.graph) if "namespace" not in node.metadata_props]
    assert bare == []


@pytest.mark.parametrize(("name", "kind"), [("cond", "If"), ("nested cond", "If"), ("while_loop", "Loop")])
def test_control_flow_bears_its_own_metadata(name: str, kind: str) -> None:
    graph = onnxplug.to_onnx(GRAPHS[name], (X,)).model.graph
    results = [node.metadata_props for node in all_nodes(graph) if node.op_type == kind]
    assert len(results) == {"cond": 1, "nested cond": 2, "while_loop": 1}[name]
    for metadata in results:
        assert metadata["namespace"].endswith({"If": ": cond", "Loop": ": while_loop"}[kind])
        assert "test_calls.py:" in metadata["pkg.onnxplug.source"]
    after = [": aten.exp" in node.metadata_props["namespace"] for node in graph if node.op_type == "Exp"]
    assert after == [True] * (name != "nested cond")


# -- a call can't be changed -------------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Any], Any]] = {
    "argument": lambda node: node.args.__setitem__(0, None),
    "list": lambda node: node.args[1].append(1),
    "item": lambda node: node.args[1].__setitem__(0, 7),
    "arguments": lambda node: setattr(node, "args", ()),
    "operator": lambda node: setattr(node, "op_name", "aten::sin"),
    "something new": lambda node: setattr(node, "marked", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_converter_that_declines_leaves_the_call_as_it_was(change: str) -> None:
    tried: list[str] = []

    def declines(g: Any, node: Any) -> Any:
        try:
            CHANGES[change](node)
        except (TypeError, AttributeError, dataclasses.FrozenInstanceError) as error:
            tried.append(type(error).__name__)
        raise Decline("always")

    rule = Rule("aten::permute", declines, priority=1)
    check(lambda x: x.permute(1, 0), X, rules=[rule])
    check(lambda x: x.permute([1, 0]).exp(), X, rules=[rule])
    assert len(tried) == 2


def test_defaults_are_not_shared_between_calls() -> None:
    """Defaults may be lists, as those of ``aten::avg_pool2d``."""

    lists = 0

    def changes(g: Any, node: Any) -> Any:
        nonlocal lists
        for argument in node.args:
            if isinstance(argument, list):
                lists += 1
                with pytest.raises(TypeError):
                    argument.append(1)
        return g.call_next(node)

    check(
        lambda x: torch.nn.functional.avg_pool2d(x[None], 2),
        torch.randn(1, 4, 4),
        rules=[Rule("aten::avg_pool2d", changes)],
    )
    assert lists


# -- other calls made of a call ----------------------------------------------------------------------------------------


def test_the_rules_that_remain() -> None:
    """Each rule hands on to the next rule; a rule that asks twice gets the same result twice."""
    order: list[str] = []

    def named(name: str) -> Callable[..., Any]:
        def convert(g: Any, node: Any) -> Any:
            order.append(name)
            if name == "declines":
                raise Decline("no")
            return g.op.Add(g.call_next(node), g.call_next(node)) if name == "twice" else g.call_next(node)

        return convert

    rules = [Rule("aten::exp", named(n), priority=-p) for p, n in enumerate(("first", "declines", "twice", "last"))]
    program = onnxplug.to_onnx(lambda x: x.exp(), (X,), rules=rules)
    assert order == ["first", "declines", "twice", "last", "last"]
    assert [n.op_type for n in program.model.graph] == ["Exp", "Add"]


def test_a_decomposition_is_the_last_of_the_rules() -> None:
    rule = Rule("aten::addr", lambda g, node: g.op.Neg(g.op.Neg(g.call_next(node))))
    program = check(lambda x: torch.addr(x, x[:, 0], x[0]), X, rules=[rule])
    assert [n.op_type for n in program.model.graph].count("Neg") in (0, 2)


def test_another_operator() -> None:
    def as_exp(g: Any, node: Any) -> Any:
        return g.convert(node.as_operator("aten::exp"))

    program = onnxplug.to_onnx(lambda x: x.sin(), (X,), rules=[Rule("aten::sin", as_exp)])
    assert [n.op_type for n in program.model.graph] == ["Exp"]


def test_a_call_that_no_rule_takes_declines() -> None:
    """A converter that converts such a call declines, and the next rule is taken."""
    library = torch.library.Library("calls", "DEF")
    library.define("nobody(Tensor x) -> Tensor")
    library.impl("nobody", lambda x: x.clone(), "CompositeExplicitAutograd")

    def asks(g: Any, node: Any) -> Any:
        call = node.as_operator("calls::nobody")
        assert not g.interpreter.has_rule(call)
        return g.convert(call)

    program = check(lambda x: x.sin(), X, rules=[Rule("aten::sin", asks)])
    assert [n.op_type for n in program.model.graph] == ["Sin"]


def test_other_arguments() -> None:
    def doubled(g: Any, node: Any) -> Any:
        x, other, alpha = node.args
        return g.convert(node.with_args([x, g.op.Mul(other, 2.0), alpha]).with_rules([Rule("x", added)]))

    def added(g: Any, node: Any) -> Any:
        return g.op.Add(node.args[0], node.args[1])

    program = onnxplug.to_onnx(lambda x, y: x + y, (X, X), rules=[Rule("aten::add.Tensor", doubled)])
    got = program(X, X + 1)
    torch.testing.assert_close(got[0] if isinstance(got, list | tuple) else got, X + 2 * (X + 1))


def test_the_value_of_another_node() -> None:
    """A converter may look behind its arguments, and use the values there."""

    def of_the_source(g: Any, node: Any) -> Any:
        source = node.fx.args[0]
        assert source.target is torch.ops.aten.neg.default
        (inner,) = g.interpreter.value_of(source.args)
        return g.op.Exp(g.op.Neg(inner))

    check(lambda x: (-x).exp(), X, rules=[Rule("aten::exp", of_the_source)])


def test_a_builder_alone_converts_no_calls() -> None:
    g = onnxplug.GraphBuilder({"": 21})
    with pytest.raises(UsageError, match="no FX graph is under conversion"):
        g.call_next(None)
