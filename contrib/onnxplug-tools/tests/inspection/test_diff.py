"""Differences between two models: exporters, opsets, and models with a single difference."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
from onnxplug_tools.inspection.diff import ModelDiff, aligned, diff
from onnxplug_tools.inspection.differences import node_rows, summary_rows, to_html, weight_rows
from onnxplug_tools.inspection.load import load_model

import onnxplug
from onnxplug.errors import OnnxplugError
from tests.support.onnx_files import BATCH, F, example, made


def _of(before: onnx.ModelProto, after: onnx.ModelProto) -> ModelDiff:
    return diff(ir.from_proto(before), ir.from_proto(after))


def _export(path: Path, **options: Any) -> ir.Model:
    onnxplug.to_onnx(*example(), path, dynamic_shapes=BATCH, **options)
    return load_model(path)


def test_metadata_are_no_difference(tmp_path: Path) -> None:
    full = _export(tmp_path / "full.onnx", metadata="full")
    difference = diff(full, _export(tmp_path / "none.onnx", metadata="none"))
    assert difference.equal
    assert difference.same_nodes == 10
    assert difference.same_weights == 11
    assert diff(full, full).equal


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_two_exporters(tmp_path: Path) -> None:
    """Our file and torch's: the same nodes, though torch writes defaults and names nodes and results otherwise."""
    model, args = example()
    torch.onnx.export(model, args, tmp_path / "torch.onnx", dynamic_shapes=BATCH, verbose=False, opset_version=20)
    difference = diff(_export(tmp_path / "ours.onnx"), load_model(tmp_path / "torch.onnx"))
    assert difference.opsets == {"": (21, 20)}
    assert difference.modules == ()
    assert (difference.same_nodes, difference.same_weights) == (10, 11)
    assert difference.weights == ()
    assert difference.inputs == ()
    assert [(c.before.type, c.after.type) for c in difference.outputs if c.before and c.after] == [
        ("float[batch, 4]", "float[batch, 4]")
    ]


def test_two_opsets(tmp_path: Path) -> None:
    """Before opset 20 there is no Gelu."""
    difference = diff(_export(tmp_path / "21.onnx"), _export(tmp_path / "18.onnx", opset_version=18))
    assert difference.opsets == {"": (21, 18)}
    assert {module.path for module in difference.modules} == {"layers.0", "layers.1"}
    for module in difference.modules:
        assert [node.operator for node in module.removed] == ["Gelu"]
        assert sorted(node.operator for node in module.added) == ["Add", "Erf", "Mul", "Mul", "Mul"]
        assert module.changed == ()
    assert difference.operators["Gelu"] == (2, 0)


def test_a_weight_that_was_trained_on(tmp_path: Path) -> None:
    model, args = example()
    onnxplug.to_onnx(model, args, tmp_path / "before.onnx")
    with torch.no_grad():
        model.layers[1].linear.weight[2, 3] += 0.25
        model.layers[0].norm.bias[0] = float("nan")
    difference = diff(load_model(tmp_path / "before.onnx"), onnxplug.to_onnx(model, args).model)
    assert difference.modules == ()
    assert {change.before.name for change in difference.weights if change.before} == {
        "layers.0.norm.bias",
        "layers.1.linear.weight",
    }
    changes = {change.before.name: change.difference for change in difference.weights if change.before}
    linear = changes["layers.1.linear.weight"]
    assert linear is not None
    assert (linear.count, linear.total) == (1, 16)
    assert linear.largest == pytest.approx(0.25)
    assert changes["layers.0.norm.bias"].largest == float("inf")


CHAIN = [
    oh.make_node("Relu", ["x"], ["a"]),
    oh.make_node("Softmax", ["a"], ["b"], axis=-1),
    oh.make_node("Sub", ["a", "b"], ["y"]),
]


def _changed(position: int, *nodes: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [*CHAIN[:position], *nodes, *CHAIN[position + 1 :]]


@pytest.mark.parametrize(
    ("nodes", "rows"),
    [
        (CHAIN, []),
        (
            [
                oh.make_node("Relu", ["x"], ["c"], name="other"),
                oh.make_node("Softmax", ["c"], ["d"]),
                oh.make_node("Sub", ["c", "d"], ["y"]),
            ],
            [],
        ),
        (_changed(1, oh.make_node("Softmax", ["a"], ["b"], axis=0)), [("~", "Softmax", "attribute axis: -1, then 0")]),
        (_changed(1, oh.make_node("LogSoftmax", ["a"], ["b"])), [("-", "Softmax", ""), ("+", "LogSoftmax", "")]),
        (
            _changed(2, oh.make_node("Sub", ["b", "a"], ["y"])),
            [("~", "Sub", "input 0: a, then b, which was b; input 1: b, then a, which was a")],
        ),
        (_changed(2, oh.make_node("Sub", ["a", "x"], ["y"])), [("~", "Sub", "input 1: b, then x, which was x")]),
        (
            [oh.make_node("Cast", ["x"], ["k"], to=F), oh.make_node("Relu", ["k"], ["a"]), *CHAIN[1:]],
            [("+", "Cast", "")],
        ),
        (
            _changed(0, oh.make_node("Relu", ["x"], ["a"], domain="com.acme")),
            [("-", "Relu", ""), ("+", "com.acme::Relu", "")],
        ),
    ],
)
def test_nodes(nodes: list[onnx.NodeProto], rows: list[tuple[str, str, str]]) -> None:
    comparison = _of(made(CHAIN), made(nodes))
    assert [(sign, node.split(" ")[0], what) for _, sign, node, what in node_rows(comparison)] == rows
    assert comparison.equal == (not rows)


@pytest.mark.parametrize(("op_type", "same"), [("Add", True), ("Mul", True), ("Sub", False), ("Pow", False)])
def test_operands_may_change_places_where_it_does_not_matter(op_type: str, same: bool) -> None:
    def model(*inputs: str) -> onnx.ModelProto:
        return made([oh.make_node(op_type, list(inputs), ["y"])], inputs=[("x", [2]), ("z", [2])])

    assert _of(model("x", "z"), model("z", "x")).equal == same
    assert not _of(model("x", "z"), model("x", "x")).equal


def test_outputs_that_changed_places() -> None:
    nodes = [oh.make_node("Split", ["x"], ["y", "z"], axis=1, num_outputs=2)]
    swapped = [oh.make_node("Split", ["x"], ["z", "y"], axis=1, num_outputs=2)]
    outputs = [("y", ["n", 2]), ("z", ["n", 2])]
    assert _of(made(nodes, outputs=outputs), made(nodes, outputs=outputs)).equal
    comparison = _of(made(nodes, outputs=outputs), made(swapped, outputs=outputs))
    assert not comparison.equal
    assert comparison.connections == ("output 0: y, then y, which was z", "output 1: z, then z, which was y")


def test_inputs_that_changed_places() -> None:
    """Callers may give them by position."""
    node = oh.make_node("Sub", ["a", "b"], ["y"])
    a, b, c = (("a", [2]), ("b", [2]), ("c", [2]))
    comparison = _of(made([node], inputs=[a, b]), made([node], inputs=[b, a]))
    assert comparison.connections == ("order of inputs: a, b, then b, a",)
    assert not comparison.equal
    assert _of(made([node], inputs=[a, b]), made([node], inputs=[c, a, b])).connections == ()


def test_defaults_are_no_difference() -> None:
    weights = {"w": np.ones((2, 3, 3, 3), np.float32)}
    inputs = [("x", [1, 3, 8, 8])]
    plain = made([oh.make_node("Conv", ["x", "w"], ["y"])], inputs=inputs, weights=weights)
    lines = {
        "strides": [1, 1],
        "pads": [0, 0, 0, 0],
        "dilations": [1, 1],
        "kernel_shape": [3, 3],
        "group": 1,
        "auto_pad": "NOTSET",
    }
    assert _of(plain, made([oh.make_node("Conv", ["x", "w"], ["y"], **lines)], inputs=inputs, weights=weights)).equal
    other = made(
        [oh.make_node("Conv", ["x", "w"], ["y"], **{**lines, "pads": [0, 1, 0, 1]})], inputs=inputs, weights=weights
    )
    (change,) = _of(plain, other).modules[0].changed
    assert change.what == ("attribute pads: not given, then [0, 1, 0, 1]",)


@pytest.mark.parametrize(("one", "other"), [(float("nan"), 1.0), ([1.0, float("nan")], [float("nan"), 1.0])])
def test_attributes_of_nan(one: Any, other: Any) -> None:
    def model(value: Any) -> onnx.ModelProto:
        return made([oh.make_node("Op", ["x"], ["y"], domain="own", a=value)])

    assert _of(model(one), model(one)).equal
    assert len(_of(model(one), model(other)).modules[0].changed) == 1


def test_bodies_and_functions() -> None:
    def model(op_type: str, in_function: str = "Relu") -> onnx.ModelProto:
        branches = {
            name: oh.make_graph([oh.make_node(op, ["x"], ["o"])], name, [], [oh.make_tensor_value_info("o", F, None)])
            for name, op in (("then_branch", "Neg"), ("else_branch", op_type))
        }
        nodes = [
            oh.make_node("Cast", ["x"], ["c"], to=onnx.TensorProto.BOOL),
            oh.make_node("If", ["c"], ["b"], name="choose", **branches),
            oh.make_node("act", ["b"], ["y"], domain="own"),
        ]
        function = oh.make_function(
            "own", "act", ["i"], ["o"], [oh.make_node(in_function, ["i"], ["o"])], [oh.make_opsetid("", 21)]
        )
        return made(nodes, inputs=[("x", [])], functions=[function])

    assert _of(model("Exp"), model("Exp")).equal
    comparison = _of(model("Exp"), model("Log"))
    assert [(m.graph, [n.operator for n in m.removed], [n.operator for n in m.added]) for m in comparison.modules] == [
        ("choose/else_branch", ["Exp"], ["Log"])
    ]
    comparison = _of(model("Exp"), model("Exp", "Elu"))
    assert [(m.graph, [n.operator for n in m.added]) for m in comparison.modules] == [("own::act", ["Elu"])]
    lacking = model("Exp")
    del lacking.functions[:]
    assert _of(model("Exp"), lacking).functions == {"own::act": False}


def _with_function(opset: int = 21, default: Any = 0.5, inputs: int = 1) -> onnx.ModelProto:
    """A model that calls a function; with ``...`` its attribute has no default, with ``None`` there is no attribute."""
    names = ["i", "j"][:inputs]
    nodes = [oh.make_node("Elu", ["i"], ["o"])]
    if default is not None:
        kind = onnx.AttributeProto.FLOAT
        nodes[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="by", type=kind))
    attributes = ["by"] if default is ... else []
    function = oh.make_function("own", "act", names, ["o"], nodes, [oh.make_opsetid("", opset)], attributes)
    if default is not None and default is not ...:
        function.attribute_proto.append(oh.make_attribute("by", default))
    model = made([oh.make_node("act", ["x"], ["y"], domain="own")], functions=[function])
    model.opset_import.append(oh.make_opsetid("own", 1))
    return model


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        ({}, []),
        ({"opset": 6}, [("own::act: opset of ai.onnx", "21", "6")]),
        ({"default": 0.25}, [("own::act: attribute by", "0.5", "0.25")]),
        ({"default": ...}, [("own::act: attribute by", "0.5", "without a default")]),
        ({"inputs": 2}, [("own::act: inputs", "1", "2")]),
    ],
)
def test_functions_of_the_same_nodes(other: dict[str, Any], rows: list[tuple[str, str, str]]) -> None:
    comparison = _of(_with_function(), _with_function(**other))
    assert [row for row in summary_rows(comparison) if "own::act" in row[0]] == rows
    assert comparison.equal == (not rows)


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (np.float32([[1, 2], [3, 4]]), np.float32([[1, 2], [3, 4]]), None),
        (np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf]), None),
        (np.float32([1, 2, -8]), np.float32([1, 2.5, -8]), "1 of 3 elements, by 0.5 at most (0.062 of the largest)"),
        (np.float32([1, 2]), np.float32([1, -np.inf]), "1 of 2 elements, by inf at most (inf of the largest)"),
        (np.float32([0, 0]), np.float32([0, 1]), "1 of 2 elements, by 1 at most (inf of the largest)"),
        (np.int64([2**60]), np.int64([2**60 + 1]), "1 of 1 elements, by 1 at most (8.7e-19 of the largest)"),
        (np.complex64([1 + 1j, 4j]), np.complex64([1 + 2j, 4j]), "1 of 2 elements, by 1 at most (0.25 of the largest)"),
        (np.complex64([complex(1, np.nan), 4j]), np.complex128([complex(1, np.nan), 4j]), "other dtype; equal"),
        (np.complex64([1, 3 + 4j]), np.float32([1, 3]), "other dtype; 1 of 2 elements, by 4 at most (0.8 of the largest)"),
        (np.float32([1, 3]), np.complex64([1, 3 + 4j]), "other dtype; 1 of 2 elements, by 4 at most (1.3 of the largest)"),
        (np.float32([1, 2]), np.float16([1, 2]), "other dtype; equal"),
        (np.float32([1, 2]), np.float64([1, 2.5]), "other dtype; 1 of 2 elements, by 0.5 at most (0.25 of the largest)"),
        (np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 4], [2, 5], [3, 6]]), "transposed; equal"),
        (np.float32([[1, 2], [3, 4]]), np.float32([[1, 3], [2, 4]]), "transposed; equal"),
        (np.float32([[1, 2], [3, 4]]), np.float32([[1, 3], [2, 5]]), "3 of 4 elements, by 1 at most (0.25 of the largest)"),
        (np.float32([1, 2]), np.float32([1, 2, 3]), "other shape"),
        (np.array(["a", "bü"], object), np.array(["a", "bü"], object), None),
        (np.array(["a", "bü"], object), np.array(["a", "c"], object), "1 of 2 texts"),
        (np.array("a", object), np.array("b", object), "1 of 1 texts"),
        (np.array([["a", "b", "c"]], object), np.array([["a"], ["b"], ["c"]], object), "transposed; equal"),
        (np.array([], object), np.array([], object), None),
        (np.array(["1", "2"], object), np.float32([1, 2]), "other dtype"),
        (np.float32(np.arange(3 << 20)), np.float32(np.arange(3 << 20)) + np.eye(1, 3 << 20, (3 << 20) - 1, dtype=np.float32)[0], "1 of 3,145,728 elements, by 1 at most (3.2e-07 of the largest)"),
    ],
)  # fmt: skip
def test_weights(before: Any, after: Any, change: str | None) -> None:
    def model(array: Any) -> onnx.ModelProto:
        return made([oh.make_node("Identity", ["block.w"], ["y"])], weights={"block.w": array})

    assert [row[2] for row in weight_rows(_of(model(before), model(after)))] == ([] if change is None else [change])


def test_weights_of_other_names_are_matched_by_their_use() -> None:
    """A constant that one exporter names, and that is a node of its own in the other model."""
    node = oh.make_node("Mul", ["x", "val_2"], ["y"])
    before = made([node], weights={"val_2": np.float32(3), "val_1": np.float32(1)})
    constant = oh.make_node("Constant", [], ["k"], value=onnx.numpy_helper.from_array(np.float32(3.5)))
    after = made([constant, oh.make_node("Mul", ["x", "k"], ["y"])], weights={"val_2": np.float32(1)})
    comparison = _of(before, after)
    assert comparison.modules == ()
    assert [row[:2] for row in weight_rows(comparison)] == [
        ("val_2 float[]", "k float[]"),
        ("val_1 float[]", ""),
        ("", "val_2 float[]"),
    ]


def test_weights_of_another_operator_are_matched_by_their_numbers() -> None:
    """One exporter writes a Gemm with the parameter, another a MatMul with a transposed copy of another name."""
    weight = np.arange(20, dtype=np.float32).reshape(4, 5)
    before = made([oh.make_node("Gemm", ["x", "fc.weight"], ["y"], transB=1)], weights={"fc.weight": weight.T.copy()})
    after = made([oh.make_node("MatMul", ["x", "val_7"], ["y"])], weights={"val_7": weight})
    assert list(weight_rows(_of(before, after))) == [
        ("fc.weight float[5, 4]", "val_7 float[4, 5]", "transposed; equal")
    ]
    after = made([oh.make_node("MatMul", ["x", "val_7"], ["y"])], weights={"val_7": weight + 1})
    assert [row[2] for row in weight_rows(_of(before, after))] == ["only before", "only after"]


def test_external_data_that_is_not_there(tmp_path: Path) -> None:
    model = made([oh.make_node("Identity", ["w"], ["y"])], weights={"w": np.ones(1000, np.float32)})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert diff(load_model(tmp_path / "m.onnx"), load_model(tmp_path / "m.onnx")).equal
    (tmp_path / "m.data").unlink()
    with pytest.raises(OnnxplugError, match="the weight 'w' can't be read"):
        diff(load_model(tmp_path / "m.onnx"), ir.from_proto(model))


def test_external_data_outside_of_the_folder_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 4000)
    (tmp_path / "models").mkdir()
    model = made([oh.make_node("Identity", ["w"], ["y"])])
    weight = model.graph.initializer.add(name="w", data_type=F, dims=[1000], data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="../secret")
    onnx.save(model, tmp_path / "models" / "m.onnx")
    monkeypatch.chdir(tmp_path / "models")
    for path in ("m.onnx", tmp_path / "models" / "m.onnx"):
        with pytest.raises(OnnxplugError, match="not one of the model's folder"):
            diff(load_model(path), load_model(path))


def _subsequence(pairs: list[tuple[int, int]]) -> bool:
    return all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))


def test_alignment() -> None:
    assert aligned("abcd", "abcd") == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert aligned("abcd", "abxcd") == [(0, 0), (1, 1), (2, 3), (3, 4)]
    assert aligned("", "ab") == []
    assert aligned("aa", "a") == [(0, 0)]
    draw = random.Random(0)
    for _ in range(200):
        a, b = ("".join(draw.choices("abc", k=draw.randrange(12))) for _ in range(2))
        pairs = aligned(a, b)
        assert all(a[i] == b[j] for i, j in pairs)
        assert _subsequence(pairs)


@pytest.mark.parametrize("make", [lambda n: ["Add", "Mul"] * n, lambda n: ["Add"] * n, lambda n: list(range(n))])
def test_long_sequences_are_aligned_in_time(make: Callable[[int], list[Any]]) -> None:
    """Ten thousand nodes that differ at both ends and in between, of few operators: no quadratic time, few nodes lost."""
    before = ["first", *make(10_000), "last"]
    after = [*before[1:]]
    del after[4_000:4_003]
    after.append("other")
    start = time.process_time()
    pairs = aligned(before, after)
    assert time.process_time() - start < 5
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    assert all(before[i] == after[j] for i, j in pairs)
    assert len(pairs) >= len(after) - 1 - 3


def test_the_page_escapes_names(tmp_path: Path) -> None:
    name = "</td><script>alert(1)</script>\x1b[31m‮"
    before = made([oh.make_node("Relu", ["x"], ["y"], name=name)])
    after = made([oh.make_node("Elu", ["x"], ["y"], name=name)])
    text = to_html(_of(before, after), "<a>", "b&c")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m\\u202e" in text
    assert "&lt;a&gt; → b&amp;c" in text
