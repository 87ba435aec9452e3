"""Rewrites: each alone against the plain form, and the driver's guards."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch._higher_order_ops import while_loop
from torch.export import Dim

from onnxplug import Rewrite
from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import ConversionError, UsageError
from onnxplug.finish.finish import finish
from onnxplug.rewrite.driver import run_rewrites
from onnxplug.rewrites.patterns import REWRITES
from onnxplug.run.session import Runner
from tests.support.check import check


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


def ones_moved(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Transpose(g.op.Reshape(g.op.Neg(x), [2, 1, 4, 1]), perm=[1, 3, 0, 2])


def ones_and_others_moved(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op.Transpose(g.op.Reshape(g.op.Neg(x), [2, 1, 4]), perm=[2, 1, 0])


CASES = {
    "gemm_from_matmul_add": (gemm, ["Gemm"]),
    "gemm_from_matmul_add/bias of another rank": (not_gemm, ["MatMul", "Add"]),
    "transpose_of_ones": (ones_moved, ["Neg", "Reshape"]),
    "transpose_of_ones/others moved too": (ones_and_others_moved, ["Neg", "Reshape", "Transpose"]),
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
    # A weight of a model: tests/rewrite/test_fast_forms.py.
    assert {r.name for r in REWRITES} - {"transposed_weight"} == {name.partition("/")[0] for name in CASES}


@pytest.mark.parametrize(
    ("dims", "perm", "op_types"),
    [
        (("b", 5, 1, 3), (0, 2, 1, 3), "Reshape"),
        ((1, "b", 3), (1, 0, 2), "Reshape"),
        ((1, "b", 0), (1, 0, 2), "Squeeze Unsqueeze"),
        (("b", "s", 1, 3), (0, 2, 1, 3), "Squeeze Unsqueeze"),
        ((1, "b", "s", 1), (3, 1, 0, 2), "Squeeze Unsqueeze"),
        ((1, "b", "s"), (1, 2, 0), "Squeeze Unsqueeze"),
        (("b", "s", 1), (1, 0, 2), "Transpose"),
        (("b", 1, 2, 3), (1, 0, 3, 2), "Transpose"),
        (("b", 2, 3), (1, 0, 2), "Transpose"),
    ],
)
def test_ones_move_beside_dynamic_sizes(dims: tuple[Any, ...], perm: tuple[int, ...], op_types: str) -> None:
    g, x = GraphBuilder({"": 21}), value("x", *dims)
    graph, tensors = assemble(g, [x], [("out", g.op.Transpose(g.op.Neg(x), perm=list(perm)))], {})
    run_rewrites(g, graph, [rewrite for rewrite in REWRITES if rewrite.name == "transpose_of_ones"])
    assert [node.op_type for node in graph] == ["Neg", *op_types.split()]
    run = Runner(finish(g, graph, tensors))
    for sizes in ({"b": 2, "s": 7}, {"b": 1, "s": 1}, {"b": 0, "s": 3}, {"b": 4, "s": 0}):
        inputs = torch.randn([size if isinstance(size, int) else sizes[size] for size in dims])
        torch.testing.assert_close(run({"x": inputs})[0], -inputs.permute(perm))


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


def run_both(build: Any, rewrites: list[Rewrite]) -> ir.Model:
    """The rewritten model, which has the results of the plain model."""
    results = []
    for chosen in ([], rewrites):
        g, x = GraphBuilder({"": 21}), value("x", 2, 4)
        graph, tensors = assemble(g, [x], [(f"out{i}", v) for i, v in enumerate(build(g, x))], {})
        run_rewrites(g, graph, chosen)
        model = finish(g, graph, tensors)
        results.append(Runner(model)({"x": torch.arange(8.0).reshape(2, 4) - 3}))
    torch.testing.assert_close(*results)
    return model


def test_a_rewrite_replaces_more_than_its_root() -> None:
    """Slices replace both halves of a Split, and the reader of one half."""

    def build(g: GraphBuilder, x: ir.Value) -> list[ir.Value]:
        left, right = g.op.Split(x, [2, 2], axis=1, _outputs=2)
        return [g.op.Sin(g.op.Neg(left)), right]

    def apply(g: GraphBuilder, node: ir.Node) -> Any:
        left, right = node.outputs
        (negated,) = left.consumers()
        part = g.op.Slice(node.inputs[0], [0], [2], [1])
        return {negated.outputs[0]: g.op.Sub(0.0, part), right: g.op.Slice(node.inputs[0], [2], [4], [1])}

    model = run_both(build, [Rewrite("halves", "Split", apply)])
    assert sorted(n.op_type for n in model.graph) == ["Sin", "Slice", "Slice", "Sub"]
    assert [v.name for v in model.graph.outputs] == ["out0", "out1"]


def test_a_rewrite_reaches_into_branches() -> None:
    def build(g: GraphBuilder, x: ir.Value) -> list[ir.Value]:
        inner = g.op.Greater(g.op.ReduceSum(x, keepdims=0), 0.0)

        def outer() -> ir.Value:
            bodies = [g.subgraph(lambda op=op: getattr(g.op, op)(g.op.Abs(x))) for op in ("Sin", "Cos")]
            return g.op.If(inner, then_branch=bodies[0], else_branch=bodies[1])

        bodies = [g.subgraph(outer), g.subgraph(lambda: g.op.Abs(g.op.Exp(x)))]
        return [g.op.If(inner, then_branch=bodies[0], else_branch=bodies[1])]

    def apply(g: GraphBuilder, node: ir.Node) -> ir.Value:
        return g.op.Max(node.inputs[0], g.op.Neg(node.inputs[0]))

    model = run_both(build, [Rewrite("abs", "Abs", apply)])
    names = [v.name for n in model.graph.all_nodes() for v in n.outputs]
    assert len(names) == len(set(names))
    operators = [n.op_type for n in model.graph.all_nodes()]
    assert (operators.count("Abs"), operators.count("Max"), operators.count("Neg")) == (0, 3, 3)


WEIGHT = torch.randn(3, 3)


def product_before_a_loop(x: torch.Tensor) -> Any:
    y = x @ WEIGHT
    return while_loop(lambda i, b: i < 3, lambda i, b: (i + 1, (y + b).sum(0) * 0.1), (torch.tensor(0), WEIGHT[0]))


def product_before_a_branch(x: torch.Tensor) -> Any:
    y = x @ WEIGHT
    return torch.cond(x.sum() > 0, lambda y: y + WEIGHT[0], lambda y: torch.zeros_like(y), (y,))


@pytest.mark.parametrize("function", [product_before_a_loop, product_before_a_branch])
def test_no_node_is_moved_into_a_body(function: Any) -> None:
    """A product stays where it is computed once; in a body it would be computed in each iteration, and beside it too."""
    others = [(torch.randn(1, 3),), (-torch.rand(7, 3),)]
    operators = check(function, torch.rand(4, 3), others=others, dynamic=({0: Dim("n")},)).statistics.operators
    assert (operators["MatMul"], operators.get("Gemm", 0)) == (1, 0)


def test_equal_nodes_of_rewrites_are_shared() -> None:
    def build(g: GraphBuilder, x: ir.Value) -> list[ir.Value]:
        return [g.op.Sin(g.op.Softsign(x)), g.op.Cos(g.op.Softsign(g.op.Neg(x))), g.op.Exp(g.op.Elu(x))]

    def apply(g: GraphBuilder, node: ir.Node) -> ir.Value:
        x = node.graph.inputs[0] if node.graph is not None else None
        bound = g.op.Add(g.op.Abs(x), 1.0)
        return g.op.Div(node.inputs[0], bound)

    rewrites = [Rewrite("softsign", "Softsign", apply)]
    model = run_both(build, rewrites)
    assert [n.op_type for n in model.graph].count("Abs") == 1


def test_an_output_that_becomes_an_input_is_copied() -> None:
    rewrites = [Rewrite("no abs", "Abs", lambda g, node: node.inputs[0])]
    model = run_both(lambda g, x: [g.op.Abs(g.op.Exp(x)), g.op.Sin(x)], rewrites)
    assert [v.name for v in model.graph.outputs] == ["out0", "out1"]
    g, x = GraphBuilder({"": 21}), value("x", 2, 4)
    graph, _ = assemble(g, [x], [("out", g.op.Abs(x))], {})
    run_rewrites(g, graph, rewrites)
    assert ([n.op_type for n in graph], graph.outputs[0].name) == (["Identity"], "out")


def test_a_cycle_is_named() -> None:
    g, graph = relu_graph()
    rewrite = Rewrite("snake", "Relu", lambda g, node: {node.outputs[0]: g.op.Abs(node.outputs[0])})
    with pytest.raises(ConversionError, match=r"depends on itself.*'snake'"):
        run_rewrites(g, graph, [rewrite])


def test_a_size_of_a_rewrite_that_declined_is_forgotten() -> None:
    """The size left the graph with the rewrite's other nodes: the next rewrite that asks for it must not get it."""

    def in_vain(g: GraphBuilder, node: ir.Node) -> Any:
        g.dim(node.inputs[0], 0)

    def by_the_size(g: GraphBuilder, node: ir.Node) -> Any:
        return g.op.Mul(node.inputs[0], g.cast(g.dim(node.inputs[0], 0), torch.float32))

    g = GraphBuilder({"": 21})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([ir.SymbolicDim("n"), 4]))
    graph, tensors = assemble(g, [x], [("out", g.op.Sin(g.op.Relu(x)))], {})
    run_rewrites(g, graph, [Rewrite("in vain", "Relu", in_vain), Rewrite("by the size", "Sin", by_the_size)])
    got = Runner(finish(g, graph, tensors))({"x": torch.ones(3, 4)})[0]
    torch.testing.assert_close(got, torch.full((3, 4), 3.0))
