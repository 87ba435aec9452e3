"""The picture of a model, from files with and without metadata, of onnxplug and of other exporters."""

from __future__ import annotations

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
from onnxplug_tools.inspection.compare_runs import compare_runs
from onnxplug_tools.inspection.diff import diff
from onnxplug_tools.inspection.load import load_model
from onnxplug_tools.inspection.places import Place, path_of_name, place_of
from onnxplug_tools.inspection.summary import to_json
from onnxplug_tools.inspection.view import ModelView, ModuleView, view

import onnxplug
from onnxplug.cli.app import run
from onnxplug.errors import OnnxplugError, UsageError
from tests.support.onnx_files import BATCH, Block, Model, example

F, I = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64  # noqa: E741


def _ours(**options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        onnxplug.to_onnx(*example(), path, dynamic_shapes=BATCH, **options)

    return write


def _torch(path: Path) -> None:
    model, args = example()
    torch.onnx.export(model, args, path, dynamic_shapes=BATCH, verbose=False)


def _torchscript(path: Path) -> None:
    model, args = example()
    torch.onnx.export(model, args, path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}})


EXPORTERS = {
    "none": _ours(metadata="none"),
    "short": _ours(metadata="short"),
    "full": _ours(metadata="full"),
    "opset 18": _ours(opset_version=18),
    "torch": _torch,
    "torchscript": _torchscript,
}
#: Path to the names of the module's children and its parameters, submodules' included.
TREE = {
    "": (["conv", "layers"], 112 + 56),
    "conv": ([], 112),
    "layers": (["0", "1"], 56),
    "layers.0": (["linear", "norm"], 28),
    "layers.0.linear": ([], 20),
    "layers.0.norm": ([], 8),
    "layers.1": (["linear", "norm"], 28),
    "layers.1.linear": ([], 20),
    "layers.1.norm": ([], 8),
}


def _modules(root: ModuleView) -> dict[str, ModuleView]:
    return {root.path: root} | {path: m for child in root.children for path, m in _modules(child).items()}


def _within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_modules(exporter: str, tmp_path: Path) -> None:
    EXPORTERS[exporter](tmp_path / "m.onnx")
    seen = view(load_model(tmp_path / "m.onnx", infer=True), {"batch": 3})
    modules = _modules(seen.root)
    assert list(modules) == list(TREE)
    parameters_by_name = dict(example()[0].named_parameters())
    assert {weight.name for weight in seen.weights} >= set(parameters_by_name)
    for path, (children, parameters) in TREE.items():
        module = modules[path]
        assert [child.name for child in module.children] == children
        constants = [w for w in seen.weights if w.name not in parameters_by_name and _within(w.module, path)]
        assert module.total_parameters == parameters + sum(w.elements for w in constants)
        nodes = [n for n in seen.nodes if _within(n.module, path)]
        assert module.total_nodes == len(nodes)
        assert module.total_flops == sum(node.flops or 0 for node in nodes)
    assert modules["layers.0.linear"].total_flops == 2 * 3 * 16 + 12
    assert modules["conv"].total_flops == 3 * 4 * 64 * (2 * 27 + 1)
    assert seen.root.total_unestimated == 0
    if exporter not in ("none", "torchscript"):
        assert modules["conv"].classes == ("torch.nn.modules.conv.Conv2d",)
        assert modules["layers.1"].classes == (f"{Block.__module__}.Block",)
        gemm = next(node for node in seen.nodes if node.module == "layers.1.linear")
        assert gemm.classes[-1] == "torch.nn.modules.linear.Linear"
        assert gemm.source is not None
        assert gemm.source.partition(":")[0].endswith("support/onnx_files.py")
    else:
        assert all(module.classes == () for module in modules.values())
    assert {node.rule is not None for node in seen.nodes} == {exporter == "full"}


def test_rules_and_rewrites() -> None:
    seen = view(onnxplug.to_onnx(*example(), metadata="full", opset_version=18).model)
    by_rule = {node.rule: node for node in seen.nodes}
    conv = by_rule["onnxplug.converters.convolution:conv"]
    assert (conv.package, conv.version) == ("onnxplug", onnxplug.__version__)
    assert conv.attributes["pads"] == "[1, 1, 1, 1]"
    assert [value.type for value in conv.outputs] == ["float[2, 4, 8, 8]"]
    program = onnxplug.to_onnx(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 4)).eval(),
        (torch.ones(2, 4),),
    )
    fired = view(program.model)
    assert [node.rewritten for node in fired.nodes] == [
        tuple(filter(None, node.metadata_props.get("pkg.onnxplug.rewrite", "").split(", ")))
        for node in program.model.graph
    ]


def test_functions() -> None:
    """A call stands for its module; the modules of the body's nodes are relative to it."""
    program = onnxplug.to_onnx(*example(), functions=True, dynamic_shapes=BATCH)
    seen = view(program.model, {"batch": 3})
    (function,) = seen.functions
    assert (function.operator, function.calls, function.nodes) == ("onnxplug.modules::Block", 2, 4)
    assert function.inputs[0] == "x"
    modules = _modules(seen.root)
    assert modules["layers.1"].nodes == 1
    assert modules["layers.1"].parameters == 28
    assert modules["layers.1"].classes == (f"{Block.__module__}.Block",)
    inlined = view(onnxplug.to_onnx(*example(), dynamic_shapes=BATCH).model, {"batch": 3})
    assert seen.root.total_flops == inlined.root.total_flops
    assert [node.module for node in seen.nodes if node.graph == "onnxplug.modules::Block"] == ["linear", "norm", "", ""]
    assert seen.operators["onnxplug.modules::Block"] == 2
    assert "Gemm" not in seen.operators


def test_branches() -> None:
    class Branches(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.cond(y.sum() > 0, lambda v: self.layers[0](v), lambda v: v - 1.5, (y,))

    program = onnxplug.to_onnx(Branches().eval(), example()[1])
    seen = view(program.model)
    graphs = list(dict.fromkeys(node.graph for node in seen.nodes))
    assert graphs == ["", "If/then_branch", "If/else_branch"]
    assert [node.index for node in seen.nodes] == list(range(len(seen.nodes)))
    assert seen.root.total_nodes == len(list(program.model.graph.all_nodes())) == sum(seen.operators.values())


def _flat(**kwargs: Any) -> onnx.ModelProto:
    """A model of no exporter: nodes without names, and no types of intermediate values."""
    nodes = [
        oh.make_node("Constant", [], ["k"], value=oh.make_tensor("k", F, [3], [1.0, 2.0, 3.0])),
        oh.make_node("Add", ["x", "k"], ["a"]),
        oh.make_node(
            "Odd",
            ["a", ""],
            ["b"],
            domain="com.acme",
            words=["[b]x[/b]", "y"],
            t=oh.make_tensor("t", I, [20], range(20)),
        ),
        oh.make_node("MatMul", ["b", "W.1"], ["y"], name="Mul_1"),
    ]
    weights = [
        oh.make_tensor("W.1", F, [3, 2], [0.5] * 6),
        oh.make_tensor("words", onnx.TensorProto.STRING, [2], [b"ab", b"cde"]),
        oh.make_tensor("nibbles", onnx.TensorProto.INT4, [3], [1, 2, 3]),
    ]
    x = oh.make_tensor_value_info("x", F, ["n", 3])
    y = oh.make_tensor_value_info("y", F, None)
    graph = oh.make_graph(nodes, "flat", [x], [y], weights)
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 21), oh.make_opsetid("com.acme", 1)], **kwargs)


def test_a_file_of_no_exporter_is_one_module() -> None:
    seen = view(ir.from_proto(_flat()), {"n": 5})
    assert seen.root.children == ()
    assert seen.root.nodes == 4
    assert seen.producer == ""
    assert seen.inputs[0].type == "float[n, 3]"
    assert seen.outputs[0].type == "float[?]"
    assert [node.flops for node in seen.nodes] == [0, None, None, None]
    assert seen.root.unestimated == 3
    odd = seen.nodes[2]
    assert odd.operator == "com.acme::Odd"
    assert odd.inputs[1].name == ""
    assert odd.attributes == {"words": "['[b]x[/b]', 'y']", "t": "int64[20]"}
    assert seen.nodes[0].attributes == {"value": "float[3] [1.0, 2.0, 3.0]"}
    assert {weight.name: (weight.dtype, weight.bytes, weight.elements) for weight in seen.weights} == {
        "W.1": ("float", 24, 6),
        "words": ("string", 5, 2),
        "nibbles": ("int4", 2, 3),
        "k": ("float", 12, 3),
    }
    assert seen.bytes_by_dtype == {"float": 36, "string": 5, "int4": 2}


def test_sequences_and_optionals() -> None:
    values = {
        "sequence(float)": oh.make_tensor_sequence_value_info("s", F, None),
        "optional(sequence(int64))": oh.make_value_info(
            "o", oh.make_optional_type_proto(oh.make_sequence_type_proto(oh.make_tensor_type_proto(I, None)))
        ),
    }
    graph = oh.make_graph([oh.make_node("SequenceEmpty", [], ["e"])], "g", list(values.values()), [])
    assert [value.dtype for value in view(ir.from_proto(oh.make_model(graph))).inputs] == list(values)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (None, ""),
        ("Conv_3", ""),
        ("conv/Conv", "conv"),
        ("layers/0/linear/Gemm_1", "layers.0.linear"),
        ("/layers/layers.0/linear/Gemm", "layers.0.linear"),
        ("/layers.10/linear/Gemm", "layers.10.linear"),
        ("/a/a.b/a.b.c/Relu", "a.b.c"),
        ("/Relu", ""),
        ("0 <= index, for x/2", ""),
        ("a//b", ""),
        ("<b>/Add", "<b>"),
        ("block@2/sub@1/Add", "block.sub"),
        ("/".join(["m"] * 500), ".".join(["m"] * 100)),
    ],
)
def test_path_of_a_name(name: str | None, path: str) -> None:
    assert path_of_name(name) == path


@pytest.mark.parametrize(
    ("name", "metadata", "expected"),
    [
        ("n", {}, Place()),
        ("n", {"other": "x"}, Place()),
        ("n", {"namespace": "linear: aten.linear.default"}, Place()),
        ("a/Add", {"namespace": ": M/b@1: B/add: aten.add.Tensor"}, Place((("", "M"), ("b", "B")))),
        ("n", {"namespace": ": M/k/v: B/add: <f a/b>"}, Place((("", "M"), ("k/v", "B")))),
        ("b/Block", {"namespace": ": M/b: m.Block"}, Place((("", "M"), ("b", "m.Block")))),
        (
            "n",
            {
                "pkg.torch.onnx.name_scopes": "['', 'b', 'add']",
                "pkg.torch.onnx.class_hierarchy": "['M', 'B', 'aten.add']",
            },
            Place((("", "M"), ("b", "B"))),
        ),
        # Metadata that can't be read are passed over.
        (
            "n",
            {
                "pkg.torch.onnx.name_scopes": "['', __import__('os')]",
                "pkg.torch.onnx.class_hierarchy": "['M', 'x']",
                "namespace": ": M/x: op",
            },
            Place((("", "M"),)),
        ),
        ("a/Add", {"pkg.torch.onnx.name_scopes": "['']", "pkg.torch.onnx.class_hierarchy": "[]"}, Place((("a", ""),))),
        ("n", {"namespace": "_empty_nn_module_stack_from_metadata_hook: x/add: op"}, Place()),
        (
            "n",
            {"pkg.torch.onnx.stack_trace": 'File "a.py", line 3, in f\n  File "/x/torch/nn/m.py", line 9, in g\n'},
            Place(source="a.py:3"),
        ),
        ("n", {"pkg.torch.onnx.stack_trace": 'File "<eval_with_key>.1", line 3, in f'}, Place()),
        ("n", {"pkg.onnxplug.package": "rules of the call"}, Place(package="rules of the call")),
        (
            "n",
            {"pkg.onnxplug.package": "acme 2.0rc1", "pkg.onnxplug.rewrite": "a, b"},
            Place(package="acme", version="2.0rc1", rewritten=("a", "b")),
        ),
    ],
)
def test_place(name: str, metadata: dict[str, str], expected: Place) -> None:
    assert place_of(name, metadata) == expected


def test_external_data_is_not_touched(tmp_path: Path) -> None:
    """The data file isn't even there; its 8 GiB count."""
    proto = _flat()
    big = proto.graph.initializer.add(
        name="big", data_type=F, dims=[1 << 16, 1 << 15], data_location=onnx.TensorProto.EXTERNAL
    )
    big.external_data.add(key="location", value="weights/big.data")
    onnx.save(proto, tmp_path / "m.onnx")
    weights = {weight.name: weight for weight in view(load_model(tmp_path / "m.onnx", infer=True)).weights}
    assert weights["big"].bytes == 8 << 30
    assert weights["big"].location == "weights/big.data"
    assert weights["W.1"].location is None


def test_missing_shapes_are_inferred_on_request(tmp_path: Path) -> None:
    graph = oh.make_graph(
        [oh.make_node("Relu", ["x"], ["a"]), oh.make_node("MatMul", ["a", "w"], ["y"])],
        "g",
        [oh.make_tensor_value_info("x", F, ["n", 3])],
        [oh.make_tensor_value_info("y", F, None)],
        [onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w")],
    )
    onnx.save(oh.make_model(graph), tmp_path / "m.onnx")

    def shapes(seen: ModelView) -> list[str]:
        return [node.outputs[0].type for node in seen.nodes]

    assert shapes(view(load_model(tmp_path / "m.onnx"))) == ["?[?]", "float[?]"]
    assert shapes(view(load_model(tmp_path / "m.onnx", infer=True))) == ["float[n, 3]", "float[n, 4]"]


def test_missing_shapes_are_inferred_in_branches_too(tmp_path: Path) -> None:
    body = onnx.parser.parse_graph("b () => (float[2] o) { p = Relu(x) q = Neg(p) o = Abs(q) }")
    graph = onnx.parser.parse_graph("g (bool c, float[2] x) => (float[2] y) { y = If(c) }")
    graph.node[0].attribute.extend(oh.make_attribute(f"{name}_branch", body) for name in ("then", "else"))
    onnx.save(oh.make_model(graph), tmp_path / "m.onnx")
    root = view(load_model(tmp_path / "m.onnx", infer=True)).root
    assert (root.flops, root.unestimated) == (6, 0)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("missing.onnx", None, UsageError, "there is no file"),
        ("m.pt2", b"PK\x03\x04rest", UsageError, "file of PyTorch"),
        ("m.onnx", b"PK\x03\x04rest", UsageError, "file of PyTorch"),
        ("m.pt", b"anything", UsageError, "file of PyTorch"),
        ("m.onnx", b"\x80\x02}q\x00.", UsageError, "file of PyTorch"),
        ("m.ort", b"\x20\x00\x00\x00ORTM", UsageError, "ONNX Runtime's own format"),
        ("m.onnx", b"", OnnxplugError, "not a sound ONNX model: it has no graph"),
        ("m.onnx", b"not a model at all", OnnxplugError, "not an ONNX model"),
        ("m.onnx", "cut", OnnxplugError, "not an ONNX model"),
    ],
)
def test_files_that_are_no_models(
    name: str, content: bytes | str | None, error: type[OnnxplugError], message: str, tmp_path: Path
) -> None:
    if content == "cut":
        content = _flat().SerializeToString()[:100]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OnnxplugError, match=message) as caught:
        load_model(tmp_path / name)
    assert type(caught.value) is error
    if content is not None and error is UsageError:
        assert caught.value.hint


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        load_model(tmp_path)


@pytest.mark.long
def test_ten_thousand_nodes_are_seen_in_linear_time() -> None:
    """No node costs more because there are others: ten times as many take about ten times as long, not a hundred."""

    def seconds(count: int) -> float:
        nodes = [
            oh.make_node("Add", [f"v{i}", "w"], [f"v{i + 1}"], name=f"layers/{i // 10}/Add_{i}") for i in range(count)
        ]
        graph = oh.make_graph(
            nodes,
            "g",
            [oh.make_tensor_value_info("v0", F, [4])],
            [oh.make_tensor_value_info(f"v{count}", F, [4])],
            [oh.make_tensor("w", F, [4], [1.0] * 4)],
        )
        model = ir.from_proto(oh.make_model(graph))
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            seen = view(model)
            best = min(best, time.process_time() - start)
        assert len(seen.root.children[0].children) == count // 10
        return best

    assert seconds(10_000) < 40 * seconds(1_000)


def test_text_that_is_no_utf8() -> None:
    """A file may have any bytes where text belongs; only text is shown."""
    content = oh.make_node("Relu", ["x"], ["y"], name="NAME/Relu")
    content.metadata_props.add(key="namespace", value="NAME: M/relu: op")
    content.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="NAME")
    proto = oh.make_model(oh.make_graph([content], "g", [oh.make_tensor_value_info("x", F, [2])], []))
    proto.metadata_props.add(key="NAME", value="NAME")
    broken = onnx.load_from_string(proto.SerializeToString().replace(b"NAME", b"a\xff\xfeb"))
    text = to_json(view(ir.from_proto(broken)))
    assert "NAME" not in text
    assert "a\\\\xff\\\\xfeb" in text


def _with_sparse(kind: str, last: float) -> onnx.ModelProto:
    """A model that adds a sparse tensor of 2 by 3 elements.

    Args:
        kind: ``"flat"`` and ``"pairs"``: a weight with indices of either form; ``"constant"``, and ``"branch"``: within a graph.
        last: Its second element that is not 0.
    """
    places = oh.make_tensor("i", I, [2, 2], [0, 1, 1, 2]) if kind == "pairs" else oh.make_tensor("i", I, [2], [1, 5])
    sparse = oh.make_sparse_tensor(oh.make_tensor("w", F, [2], [7.0, last]), places, [2, 3])
    nodes = [oh.make_node("Add", ["x", "w"], ["y"])]
    if kind == "constant":
        nodes.insert(0, oh.make_node("Constant", [], ["w"], sparse_value=sparse))
    graph = oh.make_graph(nodes, "g", [], [oh.make_tensor_value_info("y", F, [2, 3])])
    if kind != "constant":
        graph.sparse_initializer.append(sparse)
    if kind == "branch":
        choice = oh.make_node("If", ["c"], ["z"], then_branch=graph, else_branch=graph)
        graph = oh.make_graph([choice], "g", [], [oh.make_tensor_value_info("z", F, [2, 3])])
        graph.initializer.append(oh.make_tensor("c", onnx.TensorProto.BOOL, [], [True]))
    graph.input.append(oh.make_tensor_value_info("x", F, [2, 3]))
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("kind", ["flat", "pairs", "constant", "branch"])
def test_sparse_weights_are_seen_and_compared(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, last in zip(paths, (1.0, 2.0), strict=True):
        onnx.save(_with_sparse(kind, last), path)
    models = [load_model(path, infer=True) for path in paths]
    assert {weight.type for weight in view(models[0]).weights} - {"bool[]"} == {"float[2, 3]"}
    changes = diff(*models).weights
    assert {str(change.difference) for change in changes} == {"1 of 6 elements, by 1 at most (0.14 of the largest)"}
    (output,) = compare_runs(*models).outputs
    assert (output.equal, output.largest, output.count) == (False, 1.0, 1)
    assert compare_runs(models[0], models[0]).equal
    assert run(["bench", str(paths[0]), "--repeat", "1"]) == 0
    assert not {"invalid", "error"} & {*capsys.readouterr().err.split()}


def test_sparse_weights_that_take_too_much_memory(tmp_path: Path) -> None:
    model = _with_sparse("flat", 1.0)
    model.graph.sparse_initializer[0].dims[:] = [1 << 16, 1 << 16]
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(OnnxplugError, match="its sparse weights have more than 67,108,864 elements"):
        load_model(tmp_path / "m.onnx")
