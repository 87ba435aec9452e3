"""Sizes that rewrites compute, or that conversion computed for nodes that rewrites remove."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch

from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import ConversionError
from onnxplug.finish.finish import finish
from onnxplug.rewrite.driver import run_rewrites
from onnxplug.rewrite.rewrite import Rewrite
from onnxplug.run.session import Runner


def _size_of(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.cast(g.dim(x, 0), torch.float32)  # type: ignore[arg-type]


def _times_size(g: GraphBuilder, node: ir.Node) -> ir.Value:
    assert node.inputs[0] is not None
    return g.op.Mul(node.inputs[0], _size_of(g, node.inputs[0]))


def _start() -> tuple[GraphBuilder, ir.Value]:
    shape = ir.Shape([ir.SymbolicDim("n"), 4])
    return GraphBuilder({"": 21}), ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)


def _check(g: GraphBuilder, x: ir.Value, outputs: list[ir.Value], rewrites: list[Rewrite], expected: list[Any]) -> None:
    graph, tensors = assemble(g, [x], [(f"out{i}", v) for i, v in enumerate(outputs)], {})
    run_rewrites(g, graph, rewrites)
    model = finish(g, graph, tensors)
    onnx.checker.check_model(ir.to_proto(model))  # ONNX Runtime takes nodes in any order
    run = Runner(model)
    for rows in (3, 5):
        data = torch.linspace(-1, 2, 4 * rows).reshape(rows, 4)
        for got, function in zip(run({"x": data}), expected, strict=True):
            torch.testing.assert_close(got, function(data))


def test_a_size_computed_at_a_later_node_serves_an_earlier_node() -> None:
    """Exp fires last, when its input is a Neg, and finds the size that was computed at Sin, which stands after it."""

    def after_neg(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
        made = node.inputs[0].producer() if node.inputs[0] is not None else None
        if made is None or made.op_type != "Neg":
            return None
        return g.op.Expand(node.inputs[0], g.vector([g.dim(made.outputs[0], 0), 4]))

    rewrites = [
        Rewrite("relu", "Relu", lambda g, node: g.op.Abs(node.inputs[0])),
        Rewrite("abs", "Abs", lambda g, node: g.op.Neg(node.inputs[0])),
        Rewrite("exp", "Exp", after_neg),
        Rewrite("sin", "Sin", _times_size),
    ]
    g, x = _start()
    outputs = [g.op.Exp(g.op.Relu(x)), g.op.Sin(x)]
    _check(g, x, outputs, rewrites, [torch.neg, lambda d: d * len(d)])


def test_a_size_whose_nodes_a_rewrite_removed_is_computed_again() -> None:
    g, x = _start()
    outputs = [g.op.Mul(g.op.Relu(x), _size_of(g, x)), g.op.Sin(x)]

    def neg(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
        made = node.inputs[0].producer() if node.inputs[0] is not None else None
        return g.op.Neg(node.inputs[0]) if made is not None and made.op_type == "Relu" else None

    rewrites = [Rewrite("mul", "Mul", neg), Rewrite("sin", "Sin", _times_size)]
    _check(g, x, outputs, rewrites, [lambda d: -d.relu(), lambda d: d * len(d)])


def test_a_size_that_no_output_needed_is_computed_again() -> None:
    g, x = _start()
    g.dim(x, 0)
    _check(g, x, [g.op.Sin(x)], [Rewrite("sin", "Sin", _times_size)], [lambda d: d * len(d)])


def test_a_size_that_a_rewrite_emitted_in_excess_is_computed_again() -> None:
    def wasteful(g: GraphBuilder, node: ir.Node) -> ir.Value:
        assert node.inputs[0] is not None
        g.dim(node.inputs[0], 0)
        return g.op.Neg(node.inputs[0])

    g, x = _start()
    rewrites = [Rewrite("relu", "Relu", wasteful), Rewrite("sin", "Sin", _times_size)]
    _check(g, x, [g.op.Relu(x), g.op.Sin(x)], rewrites, [lambda d: -d, lambda d: d * len(d)])


def test_a_size_computed_in_a_branch_stays_there() -> None:
    g, x = _start()
    condition = g.op.Greater(g.op.ReduceSum(x, keepdims=0), 0.0)
    chosen = g.op.If(
        condition,
        then_branch=g.subgraph(lambda: g.op.Sin(g.op.Relu(x))),
        else_branch=g.subgraph(lambda: g.op.Relu(x)),
    )
    outputs = [chosen, g.op.Sin(x)]
    _check(
        g,
        x,
        outputs,
        [Rewrite("sin", "Sin", _times_size)],
        [lambda d: d.relu() * (len(d) if d.sum() > 0 else 1), lambda d: d * len(d)],
    )


def test_a_condition_that_raises_is_named() -> None:
    def condition(node: ir.Node) -> bool:
        raise KeyError("absent")

    g, x = _start()
    rewrites = [Rewrite("odd", "Sin", _times_size, when=condition)]
    with pytest.raises(ConversionError, match=r"`when`.*'odd' raised KeyError at Sin"):
        _check(g, x, [g.op.Sin(x)], rewrites, [torch.sin])
    g, x = _start()
    rewrites = [Rewrite("never", "Sin", _times_size, when=lambda node: False)]
    _check(g, x, [g.op.Sin(x)], rewrites, [torch.sin])
