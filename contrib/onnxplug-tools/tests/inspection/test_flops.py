"""Estimates of operations, against counts by hand and torch's own counter."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
from onnxplug_tools.inspection.flops import Call, estimated
from onnxplug_tools.inspection.view import view
from torch.utils.flop_counter import FlopCounterMode

import onnxplug

F = onnx.TensorProto.FLOAT
OPSET, OWN = oh.make_opsetid("", 21), oh.make_opsetid("own", 1)


def _call(op_type: str, inputs: list[Any], outputs: list[Any], **attributes: Any) -> Call:
    made = {name: ir.convenience.convert_attribute(name, value) for name, value in attributes.items()}
    return Call(op_type, inputs, outputs, made)


MS = "com.microsoft"
CASES: list[tuple[str, Call, int | None]] = [
    ("", _call("Reshape", [(2, 3), (1,)], [(6,)]), 0),
    ("", _call("Add", [(2, 1), (1, 3)], [(2, 3)]), 6),
    ("", _call("Add", [(2, 1), None], [None]), None),
    ("", _call("Sum", [(2, 3)] * 4, [(2, 3)]), 18),
    ("", _call("ReduceSum", [(4, 5), (1,)], [(4,)]), 20),
    ("", _call("Softmax", [(4, 5)], [(4, 5)]), 100),
    ("", _call("LayerNormalization", [(4, 5), (5,), (5,)], [(4, 5)]), 140),
    ("", _call("MatMul", [(7, 2, 3), (3, 4)], [(7, 2, 4)]), 2 * 7 * 2 * 3 * 4),
    ("", _call("MatMul", [(3,), (3,)], [()]), 6),
    ("", _call("MatMul", [(), (3,)], [()]), None),
    ("", _call("Gemm", [(2, 3), (4, 3), (4,)], [(2, 4)], transB=1), 2 * 2 * 3 * 4 + 8),
    ("", _call("Gemm", [(3, 2), (3, 4)], [(2, 4)], transA=1), 2 * 2 * 3 * 4),
    ("", _call("Conv", [(1, 4, 8, 8), (6, 2, 3, 3), (6,)], [(1, 6, 6, 6)], group=2), 216 * 2 * 18 + 216),
    ("", _call("ConvTranspose", [(1, 4, 5), (4, 2, 3)], [(1, 2, 7)]), 2 * 20 * 6),
    ("", _call("QLinearConv", [(1, 4, 8), (), (), (6, 4, 3), (), (), (), (), (6,)], [(1, 6, 6)]), 36 * 24 + 36),
    ("", _call("MaxPool", [(1, 2, 8, 8)], [(1, 2, 4, 4)], kernel_shape=[2, 2]), 128),
    ("", _call("Einsum", [(2, 3), (3, 4)], [(2, 4)], equation="ij,jk->ik"), 48),
    ("", _call("Einsum", [(5, 2, 3), (3, 4)], [(5, 2, 4)], equation="...ij, jk -> ...ik"), 240),
    ("", _call("Einsum", [(2, 3)], [(3,)], equation="ij->j"), 6),
    ("", _call("Einsum", [(2, 3)], [(3,)], equation="ijk->j"), None),
    ("", _call("Einsum", [(2, 3)], [(3, 2)], equation="ij->ji"), 0),
    ("", _call("Einsum", [(2, 3)], [(3, 2)], equation="ji"), 0),
    ("", _call("Einsum", [(3, 3)], [()], equation="ii"), 3),
    ("", _call("Einsum", [(2,), (3,)], [(2, 3)], equation="i,j->ij"), 6),
    ("", _call("Einsum", [(2, 3), (3, 4)], [(2, 4)], equation="ij,jk"), 48),
    ("", _call("Einsum", [(5, 2, 3)], [(3, 2)], equation="...ij->ji"), 30),
    ("", _call("Einsum", [(5, 2, 3)], [(5, 3, 2)], equation="...ij->...ji"), 0),
    ("", _call("Einsum", [(0, 3), (3, 4)], [(0, 4)], equation="ij,jk->ik"), 0),
    ("", _call("Einsum", [(1, 3), (0, 3)], [(0,)], equation="ij,ij->i"), 0),
    ("", _call("LSTM", [(5, 2, 3), (1, 16, 3), (1, 16, 4)], [(5, 1, 2, 4)]), 10 * (2 * 48 + 2 * 64 + 16)),
    ("", _call("GRU", [(5, 2, 3), (2, 12, 3), (2, 12, 4), (2, 24)], [(5, 2, 2, 4)]), 10 * (144 + 192 + 2 * 36)),
    ("", _call("Resize", [(1, 2, 4, 4), None, None, (4,)], [(1, 2, 8, 8)], mode="linear"), 128 * 6),
    ("", _call("Resize", [(1, 2, 4, 4), None, None, (4,)], [(1, 2, 8, 8)]), 0),
    ("", _call("NonMaxSuppression", [(1, 2, 4)], [None]), None),
    ("com.acme", _call("Add", [(2, 3)], [(2, 3)]), None),
    (MS, _call("FusedMatMul", [(3, 2), (3, 4)], [(2, 4)], transA=1), 48),
    (MS, _call("FusedMatMul", [(2, 7, 3), (7, 3, 4)], [(7, 2, 4)], transBatchA=1), 2 * 56 * 3),
    # the bias is input 6, and input 8 a zero point
    (MS, _call("QGemm", [(2, 3), (), (), (3, 4), (), (), (4,)], [(2, 4)]), 48 + 8),
    (MS, _call("QGemm", [(2, 3), (), (), (3, 4), (), (), None, (), ()], [(2, 4)]), 48),
    (MS, _call("MatMulIntegerToFloat", [(2, 3), (3, 4), (), (), None, None, (4,)], [(2, 4)]), 48 + 8),
    (MS, _call("MatMulIntegerToFloat", [(2, 3), (3, 4), (), (), (), ()], [(2, 4)]), 48),
    (MS, _call("DynamicQuantizeMatMul", [(2, 3), (3, 4), (), (), (4,)], [(2, 4)]), 48 + 8),
    (
        MS,
        _call("MatMulNBits", [(5, 2, 64), (32, 2, 16), (64,)], [(5, 2, 32)], N=32, K=64, bits=4, block_size=32),
        40960,
    ),
    (MS, _call("MoE", [(10, 4), (10, 3), (3, 8, 4), None, (3, 4, 8)], [(10, 4)], k=2), 2 * 10 * 2 * 64),
    # 2 heads of size 4, 3 queries, 5 keys (2 of them in the cache)
    (
        MS,
        _call(
            "MultiHeadAttention",
            [(1, 3, 8), (1, 3, 8), (1, 3, 8), None, None, None, (1, 2, 2, 4)],
            [(1, 3, 8)],
            num_heads=2,
        ),
        2 * 15 * 16 + 5 * 2 * 15,
    ),
    (
        MS,
        _call(
            "GroupQueryAttention",
            [(1, 3, 8), (1, 3, 4), (1, 3, 4), (1, 1, 2, 4)],
            [(1, 3, 8)],
            num_heads=2,
            kv_num_heads=1,
        ),
        2 * 15 * 16 + 5 * 2 * 15,
    ),
    (
        MS,
        _call("Attention", [(1, 3, 6), (6, 24), (24,)], [(1, 3, 8)], num_heads=2),
        3 * 24 * 13 + 2 * 9 * 16 + 5 * 2 * 9,
    ),
    ("", _call("Attention", [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6)], [(1, 2, 3, 6)]), 2 * 15 * 20 + 5 * 2 * 15),
    ("", _call("Attention", [(1, 3, 8), (1, 5, 8), (1, 5, 12)], [(1, 3, 12)], q_num_heads=2), 2 * 15 * 20 + 5 * 2 * 15),
]


@pytest.mark.parametrize(("domain", "call", "expected"), CASES, ids=lambda value: getattr(value, "op_type", None))
def test_table(domain: str, call: Call, expected: int | None) -> None:
    assert estimated(call, domain) == expected


class Products(torch.nn.Module):
    """Only products, without biases: torch's counter counts no other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 6, 3, groups=2, stride=2, bias=False)
        self.up = torch.nn.ConvTranspose2d(6, 3, 2, stride=2, bias=False)
        self.linear = torch.nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = self.linear(y)
        return self.up(self.conv(x)), z @ z.transpose(1, 2)


@pytest.mark.parametrize("batch", [2, 5])
def test_products_as_torch_counts_them(batch: int) -> None:
    model = Products().eval()
    args = (torch.randn(2, 4, 17, 15), torch.randn(2, 3, 8))
    program = onnxplug.to_onnx(model, args, dynamic_shapes=({0: "batch"}, {0: "batch"}))
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randn(batch, 4, 17, 15), torch.randn(batch, 3, 8))
    root = view(program.model, {"batch": batch}).root
    assert root.total_unestimated == 0
    assert root.total_flops == counter.get_total_flops()
    by_module = {child.path: child.total_flops for child in root.children}
    for path, counts in counter.get_flop_counts().items():
        name = path.partition(".")[2]
        if name:
            assert by_module[name] == sum(counts.values())


def test_without_sizes_there_is_no_estimate() -> None:
    program = onnxplug.to_onnx(
        Products().eval(),
        (torch.randn(2, 4, 17, 15), torch.randn(2, 3, 8)),
        dynamic_shapes=({0: "batch"}, {0: "batch"}),
    )
    root = view(program.model).root
    assert root.total_flops == 0
    assert root.total_unestimated == sum(node.flops is None for node in view(program.model).nodes) > 0


def _load(model: onnx.ModelProto) -> ir.Model:
    return ir.from_proto(model)


def _body(name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> onnx.GraphProto:
    return oh.make_graph(nodes, name, inputs, outputs)


def _value(name: str, *shape: Any) -> onnx.ValueInfoProto:
    return oh.make_tensor_value_info(name, F, list(shape))


@pytest.mark.parametrize("other", [[], ["Relu"], ["Other", "Other"]])
def test_an_if_counts_the_nodes_without_an_estimate_of_either_branch(other: list[str]) -> None:
    known = _body("t", [oh.make_node("Relu", ["x"], ["a"])], [], [_value("a", 4, 4)])
    nodes = [oh.make_node(n, ["x"], [f"b{i}"], domain="own" if n == "Other" else "") for i, n in enumerate(other)]
    branches = {"then_branch": known, "else_branch": _body("e", nodes, [], [_value("x" if not other else "b0", 4, 4)])}
    inputs = [_value("x", 4, 4), oh.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])]
    node = oh.make_node("If", ["c"], ["y"], **branches)
    root = view(_load(oh.make_model(oh.make_graph([node], "g", inputs, [_value("y", 4, 4)])))).root
    assert (root.flops, root.unestimated) == (16, other.count("Other"))


def test_an_if_counts_as_its_larger_branch() -> None:
    large = _body("t", [oh.make_node("MatMul", ["x", "x"], ["a"])], [], [_value("a", 4, 4)])
    small = _body("e", [oh.make_node("Neg", ["x"], ["b"])], [], [_value("b", 4, 4)])
    node = oh.make_node("If", ["c"], ["y"], name="choose", then_branch=small, else_branch=large)
    graph = oh.make_graph(
        [node], "g", [_value("x", 4, 4), oh.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])], [_value("y", 4, 4)]
    )
    seen = view(_load(oh.make_model(graph)))
    assert [(node.graph, node.flops) for node in seen.nodes] == [
        ("", 128),
        ("choose/else_branch", 128),
        ("choose/then_branch", 16),
    ]
    assert seen.root.flops == 128
    assert seen.root.nodes == 3


@pytest.mark.parametrize("trips", [3, 0, -1, None, 2**31 - 1, 2**63 - 1])
def test_a_loop_counts_as_often_as_it_runs(trips: int | None) -> None:
    state = [
        oh.make_tensor_value_info("i", onnx.TensorProto.INT64, []),
        oh.make_tensor_value_info("c", onnx.TensorProto.BOOL, []),
    ]
    body = _body(
        "b",
        [oh.make_node("Relu", ["s"], ["t"]), oh.make_node("Identity", ["c"], ["d"])],
        [*state, _value("s", 2, 5)],
        [oh.make_tensor_value_info("d", onnx.TensorProto.BOOL, []), _value("t", 2, 5)],
    )
    nodes = [oh.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    inputs = [_value("x", 2, 5)]
    initializers = []
    if trips is None:
        inputs.append(oh.make_tensor_value_info("n", onnx.TensorProto.INT64, []))
    else:
        initializers.append(oh.make_tensor("n", onnx.TensorProto.INT64, [], [trips]))
    graph = oh.make_graph(nodes, "g", inputs, [_value("y", 2, 5)], initializers)
    root = view(_load(oh.make_model(graph))).root
    is_known = trips is not None and trips < 1000  # exporters write the largest integer for a loop without a limit
    assert (root.flops, root.unestimated) == ((10 * max(0, trips), 0) if is_known else (0, 1))


def test_a_scan_counts_each_element_of_its_axis() -> None:
    body = _body(
        "b",
        [oh.make_node("Add", ["s", "e"], ["t"]), oh.make_node("Identity", ["t"], ["o"])],
        [_value("s", 4), _value("e", 4)],
        [_value("t", 4), _value("o", 4)],
    )
    node = oh.make_node("Scan", ["s0", "x"], ["last", "y"], body=body, num_scan_inputs=1, scan_input_axes=[1])
    graph = oh.make_graph([node], "g", [_value("s0", 4), _value("x", 4, 6)], [_value("last", 4), _value("y", 6, 4)])
    assert view(_load(oh.make_model(graph))).root.flops == 24


def _function(name: str, nodes: list[Any]) -> onnx.FunctionProto:
    return oh.make_function("own", name, ["x"], ["y"], nodes, [oh.make_opsetid("", 21), oh.make_opsetid("own", 1)])


def _with_functions(functions: list[Any]) -> ir.Model:
    graph = oh.make_graph(
        [oh.make_node("f0", ["x"], ["y"], domain="own")], "g", [_value("x", 2, 3)], [_value("y", 2, 3)]
    )
    opsets = [oh.make_opsetid("", 21), oh.make_opsetid("own", 1)]
    return _load(oh.make_model(graph, functions=functions, opset_imports=opsets))


def test_functions_that_call_themselves_and_each_other_end() -> None:
    """A file may have such functions, though no runtime runs it; and 2**60 calls are not counted one by one."""
    again = view(_with_functions([_function("f0", [oh.make_node("f0", ["x"], ["y"], domain="own")])]))
    assert (again.root.flops, again.root.unestimated) == (0, 1)
    depth = 60
    functions = [
        _function(
            f"f{level}",
            [
                oh.make_node(f"f{level + 1}", ["x"], ["a"], domain="own"),
                oh.make_node(f"f{level + 1}", ["a"], ["y"], domain="own"),
            ],
        )
        for level in range(depth)
    ]
    functions.append(_function(f"f{depth}", [oh.make_node("Relu", ["x"], ["y"])]))
    assert view(_with_functions(functions)).root.unestimated > 0


@pytest.mark.parametrize(("given", "default", "transposed"), [(1, None, 1), (0, 1, 0), (None, 1, 1), (None, None, 0)])
def test_a_function_has_the_attributes_of_its_call(given: int | None, default: int | None, transposed: int) -> None:
    def referring(*names: str) -> list[onnx.AttributeProto]:
        kind = onnx.AttributeProto.INT
        return [onnx.AttributeProto(name=name, ref_attr_name="swap", type=kind) for name in names]

    def function(name: str, node: onnx.NodeProto, default: int | None) -> onnx.FunctionProto:
        made = oh.make_function("own", name, ["a", "b"], ["y"], [node], [OPSET, OWN], ["swap"])
        made.value_info.append(_value("y", 8, 5))
        if default is not None:
            del made.attribute[:]
            made.attribute_proto.append(oh.make_attribute("swap", default))
        return made

    product, through = oh.make_node("Gemm", ["a", "b"], ["y"]), oh.make_node("inner", ["a", "b"], ["y"], domain="own")
    product.attribute.extend(referring("transA"))
    through.attribute.extend(referring("swap"))
    functions = [function("inner", product, None), function("outer", through, default)]
    rows = 3 if transposed else 8
    attributes = {} if given is None else {"swap": given}
    calls = [oh.make_node("outer", ["a", "b"], ["y"], domain="own", **attributes)]
    shape = (rows, 8) if transposed else (8, rows)
    graph = oh.make_graph(calls, "g", [_value("a", *shape), _value("b", rows, 5)], [_value("y", 8, 5)])
    seen = view(_load(oh.make_model(graph, functions=functions, opset_imports=[OPSET, OWN])))
    assert (seen.root.flops, seen.root.unestimated) == (2 * 8 * 5 * rows, 0)
    assert [node.flops for node in seen.nodes if node.op_type == "Gemm"] == [None]  # it differs from call to call
