"""Rewrites: each alone against the plain form, and the driver's guards."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxplug import Rewrite
from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import ConversionError, UsageError
from onnxplug.finish.finish import finish
from onnxplug.rewrite.driver import run_rewrites
from onnxplug.rewrite.patterns import REWRITES
from onnxplug.run.session import Runner


def value(name: str, *dims: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


def gemm(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Add(g.const(torch.randn(3)), g.op.MatMul(x, g.const(torch.randn(4, 3))))


def not_gemm(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Add(g.op.MatMul(x, g.const(torch.randn(4, 3))), g.const(torch.randn(2, 1, 3)))


def where_not(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Where(g.op.Not(g.op.Greater(x, 0.0)), x, g.op.Neg(x))


def slices(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Slice(g.op.Slice(x, [1], [2], [0]), [1], [3], [1])


def same_axis(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Slice(g.op.Slice(x, [1], [4], [1]), [1], [3], [1])


CASES = {
    "gemm_from_matmul_add": (gemm, ["Gemm"]),
    "gemm_from_matmul_add/bias of another rank": (not_gemm, ["MatMul", "Add"]),
    "where_of_not": (where_not, ["Greater", "Neg", "Where"]),
    "slice_of_slice": (slices, ["Slice"]),
    "slice_of_slice/same axis": (same_axis, ["Slice", "Slice"]),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_rewrite(name: str, alone: bool, expect_graph: Any) -> None:
    build, expected = CASES[name]
    chosen = [r for r in REWRITES if not alone or r.name == name.partition("/")[0]]
    results = []
    for rewrites in ([], chosen):
        torch.manual_seed(0)
        g, x = GraphBuilder({"": 21}), value("x", 2, 4)
        graph, tensors = assemble(g, [x], [("out", build(g, x))], {})
        run_rewrites(g, graph, rewrites)
        model = finish(g, graph, tensors)
        results.append(Runner(model)({"x": torch.arange(8.0).reshape(2, 4) - 3})[0])
    expect_graph(model, " ".join(expected))
    torch.testing.assert_close(results[0], results[1])
    assert model.graph.outputs[0].name == "out"


def test_every_rewrite_has_a_case() -> None:
    assert {r.name for r in REWRITES} == {name.partition("/")[0] for name in CASES}


def relu_graph() -> tuple[GraphBuilder, ir.Graph]:
    g, x = GraphBuilder({"": 21}), value("x", 2, 4)
    return g, assemble(g, [x], [("out", g.op.Relu(x))], {})[0]


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda g, node: g.op.Relu(g.op.Neg(g.op.Neg(g.op.Abs(node.inputs[0])))), "does not terminate"),
        (lambda g, node: g.op.Cast(node.inputs[0], to=7), "changed"),
        (lambda g, node: g.op.Unsqueeze(node.inputs[0], [0]), "changed the rank"),
        (lambda g, node: [node.inputs[0]] * 2, "returned 2 values for 1"),
        (lambda g, node: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_bad_rewrites_are_stopped_and_named(apply: Any, message: str) -> None:
    g, graph = relu_graph()
    with pytest.raises(ConversionError, match=message) as caught:
        run_rewrites(g, graph, [Rewrite("bad one", "Relu", apply)])
    assert "bad one" in str(caught.value)


def test_conditions() -> None:
    rewrite = Rewrite("r", "Relu", lambda g, node: None, opset=(18, 20), domains={"com.acme": 2})
    assert rewrite.applies_to({"": 18, "com.acme": 2})
    assert not rewrite.applies_to({"": 17, "com.acme": 2})
    assert not rewrite.applies_to({"": 21, "com.acme": 2})
    assert not rewrite.applies_to({"": 18, "com.acme": 1})


def test_rewrites_for_a_target_and_an_exactness() -> None:
    rewrite = Rewrite("r", "Relu", lambda g, node: None, target="onnxruntime:cpu", exact=False)
    assert rewrite.applies_to({"": 21}, "onnxruntime:cpu")
    assert not rewrite.applies_to({"": 21}, "onnxruntime")
    assert not rewrite.applies_to({"": 21}, None)
    assert not rewrite.applies_to({"": 21}, "onnxruntime:cpu", exact=True)
    with pytest.raises(UsageError, match="a target is"):
        Rewrite("r", "Relu", lambda g, node: None, target="CPU!")
