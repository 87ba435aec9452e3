"""Exports for targets: the nodes that would not be computed, their places, and the consequences."""

from __future__ import annotations

import json
import time
import warnings
from functools import cache
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from onnxplug_targets import TARGETS, fallbacks
from onnxplug_targets.forms import DTYPES
from onnxplug_targets.observer import TargetWarning
from onnxplug_targets.prediction import Judge, documented_types
from onnxplug_targets.table import load
from torch import nn

import onnxplug
from onnxplug.cli.app import run


class Mixed(nn.Module):
    """Some operators that OpenVINO takes, and some that it does not."""

    def forward(self, x: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Three results."""
        y = torch.relu(x @ x.transpose(0, 1))
        z = wide + 1  # OpenVINO has no doubles
        return y, z, torch.isnan(x)


def _lines(*texts: str) -> list[str]:
    source = Path(__file__).read_text().splitlines()
    return [f"{number}" for text in texts for number, line in enumerate(source, 1) if line.strip().startswith(text)]


MIXED = (torch.randn(3, 4), torch.randn(2, dtype=torch.float64))


def test_fallbacks_with_the_users_lines() -> None:
    with pytest.warns(TargetWarning) as caught:
        program = onnxplug.to_onnx(Mixed(), MIXED, target="openvino", verify=True)
    result = fallbacks(program, "openvino")
    assert [(f.operator, f.reason, f.consequence) for f in result] == [
        ("Add", "T=double", "left to the CPU"),
        ("IsNaN", "no kernel", "left to the CPU"),
    ]
    assert [f.place.rpartition(":")[2] for f in result] == _lines("z = wide + 1", "return y, z, torch.isnan")
    (warned,) = [str(item.message) for item in caught if item.category is TargetWarning]
    assert "would not compute 2 of " in warned
    assert all(f.place in warned for f in result)
    for place in ("onnxruntime:openvino", "openvino"):
        assert [f.node for f in fallbacks(program.model, place)] == [f.node for f in result]


def test_the_report_has_them(tmp_path: Path) -> None:
    with pytest.warns(TargetWarning):
        program = onnxplug.to_onnx(Mixed(), MIXED, target="onnxruntime:openvino", report=tmp_path / "report")
    (table,) = program.report.tables
    assert [row[0] for row in table.rows] == ["Add", "IsNaN"]
    made = json.loads((tmp_path / "report" / "report.json").read_text())["tables"]
    assert made == [{"title": table.title, "head": [*table.head], "rows": [[*row] for row in table.rows]}]
    for name in ("report.md", "report.html"):
        text = (tmp_path / "report" / name).read_text()
        assert table.title in text
        assert "left to the CPU" in text


def test_a_model_that_is_computed_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings():
        warnings.simplefilter("error", TargetWarning)
        program = onnxplug.to_onnx(
            model.eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},), target="openvino", report=True
        )
    assert fallbacks(program, "openvino") == []
    assert program.report.tables == []
    program.verify()


def test_types_after_a_conversion_of_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    table = Judge(load("openvino"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, (torch.randn(2, 4),), target="openvino", dtype="bfloat16")
    result = list(table.fallbacks(program.model))
    assert result
    assert all("bfloat16" in f.reason for f in result)
    (warned,) = [str(w.message) for w in caught if w.category is TargetWarning]
    assert f"would not compute {len(result)} of " in warned


def test_models_that_break_a_session() -> None:
    """OpenVINO's provider takes every Loop and then fails on it."""
    body = "g (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Add(s, s) }"
    graph = onnx.parser.parse_graph("g (int64 n, bool c, float[2] x) => (float[2] y) { a = Relu(x) y = Loop(n, c, a) }")
    attribute = onnx.helper.make_attribute("body", onnx.parser.parse_graph(body))
    graph.node[1].attribute.append(attribute)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    (result,) = fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "openvino")
    assert result.operator == "Loop"
    assert result.consequence.startswith("the model does not run: ")


def test_nodes_of_a_subgraph_count_for_its_owner() -> None:
    then = onnx.parser.parse_graph("g () => (float[2] y) { y = Relu(a) }")
    other = onnx.parser.parse_graph("g () => (float[2] y) { y = Hardmax(a) }")
    for branch, operators in ((then, []), (other, ["If"])):
        graph = onnx.parser.parse_graph("g (bool c, float[2] x) => (float[2] z) { a = Relu(x) z = If(c) }")
        attributes = [("then_branch", then), ("else_branch", branch)]
        graph.node[1].attribute.extend(onnx.helper.make_attribute(*item) for item in attributes)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
        result = fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "openvino")
        assert [f.operator for f in result] == operators
    assert result[0].reason == "Hardmax in it: no kernel"


@pytest.mark.parametrize(("read", "is_whole"), [("x", True), ("a", True), ("b", False), ("y", False)])
def test_groups_around_a_loop(read: str, is_whole: bool) -> None:
    """As onnxruntime-qnn 2.7.0 did: a loop waits for the group whose first nodes it reads, and not for later nodes."""
    text = "g (float[2,3] x, int64 n, bool c) => (float[2,3] y, float[3] z) { a = Relu(x) b = Mul(a, a) y = Tanh(b) "
    graph = onnx.parser.parse_graph(text + "o = Loop(n, c) s = Shape(o) f = Cast <to = 1> (s) z = Mul(f, f) }")
    text = f"b (int64 i, bool e) => (bool d, float[2,3] p) {{ d = Identity(e) p = Add({read}, {read}) }}"
    graph.node[3].attribute.append(onnx.helper.make_attribute("body", onnx.parser.parse_graph(text)))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    result = fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "qnn")
    loop = ["Loop", "Shape"]
    whole = ["Relu", "Mul", "Tanh", *loop, "Cast", "Mul"]
    assert [f.operator for f in result] == (loop if is_whole else whole)
    assert {f.reason.startswith("a group of nodes is computed before and after") for f in result} == {
        False,
        not is_whole,
    }
    assert [f.operator for f in fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "webgpu")] != whole


@pytest.mark.parametrize("read", ["c", "r", "t"])
@pytest.mark.parametrize("operator", ["Conv(x, w)", "Identity(x)", "Tanh(x)"])
def test_groups_with_a_convolution(operator: str, read: str) -> None:
    """As onnxruntime-openvino 1.24.1 did: a group is left if a node that is left reads a Conv or an Identity of it."""
    text = "g (float[1,1,3,3] x, float[1,1,1,1] w) => (float[1,1,3,3] y, bool[1,1,3,3] n) { "
    text += f"c = {operator} r = Relu(c) t = Tanh(r) n = IsNaN({read}) y = Mul(t, t) }}"
    model = onnx.helper.make_model(onnx.parser.parse_graph(text), opset_imports=[onnx.helper.make_opsetid("", 21)])
    result = fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "openvino")
    whole = read == "c" and operator != "Tanh(x)"
    assert [f.operator for f in result] == (
        [operator.partition("(")[0], "Relu", "Tanh", "IsNaN", "Mul"] if whole else ["IsNaN"]
    )


@pytest.mark.parametrize("last", ["y = Hardmax(b)", "h = Hardmax(b) y = Tanh(h)"])
@pytest.mark.parametrize("group", [["Sub"], ["Sub", "Relu"]])
def test_groups_of_one_node(group: list[str], last: str) -> None:
    """As onnxruntime-openvino 1.24.1 did: a group of one node is left, if it isn't the last."""
    text = "g (float[3,3] x) => (float[3,3] y) { r = Relu(x) q = Tanh(r) a = Hardmax(q) "
    text += "b = Sub(a, a) " if len(group) == 1 else "s = Sub(a, a) b = Relu(s) "
    graph = onnx.parser.parse_graph(f"{text}{last} }}")
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    result = [f.operator for f in fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "openvino")]
    assert result == ["Hardmax", *(group if len(group) == 1 and "Tanh" in last else []), "Hardmax"]


@pytest.mark.parametrize("target", ["openvino", "qnn"])
@pytest.mark.parametrize("reader", ["b = Sub(k, k)", "b = If(c)"])
def test_constants_as_nodes(reader: str, target: str) -> None:
    """ONNX Runtime makes initializers of Constant nodes, which a group of one node, or a subgraph, reads."""
    text = f"{{ r = Relu(x) q = Tanh(r) {reader} h = Hardmax(b) y = Add(h, q) }}"
    branches = [onnx.parser.parse_graph(f"g () => (float[3,3] o) {{ o = {name}(k, k) }}") for name in ("Add", "Sub")]
    weight = onnx.helper.make_tensor("k", onnx.TensorProto.FLOAT, (3, 3), range(9))
    found = []
    for is_node in (True, False):
        graph = onnx.parser.parse_graph(f"g (float[3,3] x, bool c) => (float[3,3] y) {text}")
        if "If" in reader:
            names = ("then_branch", "else_branch")
            graph.node[2].attribute.extend(map(onnx.helper.make_attribute, names, branches))
        if is_node:
            graph.node.insert(0, onnx.helper.make_node("Constant", [], ["k"], value=weight))
        else:
            graph.initializer.append(weight)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
        found.append(fallbacks(ir.from_proto(onnx.shape_inference.infer_shapes(model)), target))
    assert found[0] == found[1]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnxplug.to_onnx(Mixed(), MIXED).save(path)
    assert [f.operator for f in fallbacks(path, "openvino")] == ["Add", "IsNaN"]
    (tmp_path / "no.onnx").write_bytes(b"\0no model")
    for name in ("no.onnx", "nothing.onnx"):
        with pytest.raises(onnxplug.UsageError, match=f"{name} (can't be read|is no ONNX file)"):
            fallbacks(str(tmp_path / name), "openvino")
    with pytest.raises(onnxplug.UsageError, match="'openvin' is unknown") as raised:
        fallbacks(path, "openvin")
    assert raised.value.hint == "Did you mean 'openvino'?"


def test_branches_within_branches(tmp_path: Path) -> None:
    """In time linear in their depth."""
    inner = onnx.parser.parse_graph("g () => (float[2] o) { o = Hardmax(x) }")
    for depth in range(25):
        names = ("then_branch", "else_branch")
        node = onnx.helper.make_node("If", ["c"], ["o"], f"choice{depth}", **dict.fromkeys(names, inner))
        inner = onnx.helper.make_graph([node], "g", [], inner.output)
        inner.node[0].attribute[1].g.CopyFrom(onnx.parser.parse_graph("g () => (float[2] o) { o = Relu(x) }"))
    inner.input.extend(onnx.parser.parse_graph("g (bool c, float[2] x) => () { }").input)
    model = onnx.helper.make_model(inner, opset_imports=[onnx.helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "m.onnx")
    begin = time.process_time()
    (result,) = fallbacks(tmp_path / "m.onnx", "openvino")
    assert time.process_time() - begin < 10  # it took minutes
    assert (result.node, result.reason.endswith("If in it: Hardmax in it: no kernel")) == ("choice24", True)


def test_files_that_are_sound_and_odd(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    graph = onnx.parser.parse_graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    graph.node[0].domain = "ai.onnx"  # the same domain, for which shape inference has no opset
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]), path)
    assert fallbacks(path, "openvino") == []
    text = "g (float[1,2] x) => (seq(map(int64, float)) y) { y = ai.onnx.ml.ZipMap<classlabels_int64s=[1,2]>(x) }"
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(onnx.helper.make_model(onnx.parser.parse_graph(text), opset_imports=opsets), path)
    with pytest.raises(onnxplug.UsageError, match="can't be read by onnx_ir: Map types"):
        fallbacks(path, "openvino")


def test_documented_tables() -> None:
    program = onnxplug.to_onnx(Mixed(), MIXED)
    of_tensorrt = [(f.operator, f.reason) for f in fallbacks(program, "tensorrt")]
    assert of_tensorrt == [("Add", "double is not in the table")]
    of_coreml = [(f.operator, f.reason) for f in fallbacks(program, "coreml")]
    assert of_coreml == [("Add", "double is not in the table"), ("IsNaN", "not documented")]
    of_directml = [(f.operator, f.reason) for f in fallbacks(program, "directml")]
    assert of_directml == [("Add", "double is not in the table")]
    sampled = onnx.parser.parse_graph(
        "g (float[1,2,4,4,4] x, float[1,2,2,2,3] p) => (float[1,2,2,2,2] y) { y = GridSample(x, p) }"
    )
    model = onnx.helper.make_model(sampled, opset_imports=[onnx.helper.make_opsetid("", 21)])
    assert [f.reason for f in fallbacks(ir.from_proto(model), "tensorrt")] == ["rank 5"]
    assert [f.reason for f in fallbacks(ir.from_proto(model), "directml")] == ["no kernel of version 20, but of 16"]


class Block(nn.Module):
    """A module that is exported as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product with weights, and an operator that OpenVINO lacks."""
        return torch.where(torch.isnan(self.linear(x)), x, x + 1)


@pytest.mark.parametrize("target", TARGETS)
def test_functions_are_judged_as_if_they_were_inlined(target: str, tmp_path: Path) -> None:
    model, args = nn.Sequential(Block(), Block(), Block()), (torch.randn(3, 4),)
    found = []
    for functions in ([Block], False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = onnxplug.to_onnx(model, args, functions=functions, target=target)
        assert bool(program.model.functions) == bool(functions)
        program.save(tmp_path / "m.onnx")
        of_file = [(f.operator, f.reason) for f in fallbacks(tmp_path / "m.onnx", target)]
        of_program = [(f.operator, f.reason) for f in fallbacks(program, target)]
        texts = [str(item.message) for item in caught if item.category is TargetWarning]
        found.append((of_file, of_program, texts))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_functions_in_a_branch(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    branch = onnx.parser.parse_graph("g () => (float[2] y) { y = own.act(x) }")
    graph = onnx.parser.parse_graph("g (bool c, float[2] x) => (float[2] z) { z = If(c) }")
    graph.node[0].attribute.extend(onnx.helper.make_attribute(f"{name}_branch", branch) for name in ("then", "else"))
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("own", 1)]
    for operator, expected in (("Relu", []), ("Hardmax", ["Hardmax in it: no kernel"])):
        act = onnx.helper.make_node(operator, ["i"], ["o"])
        function = onnx.helper.make_function("own", "act", ["i"], ["o"], [act], opsets[:1])
        model = onnx.helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
        onnx.save(model, path)
        assert [f.reason for f in fallbacks(path, "openvino")] == expected


def test_unknown_target() -> None:
    with pytest.raises(onnxplug.UsageError, match="target='opnvino' is unknown") as raised:
        onnxplug.to_onnx(nn.ReLU(), (torch.randn(2),), target="opnvino")
    assert "Did you mean 'openvino'?" in (raised.value.hint or "")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return torch.isnan(x), x + 1\n\n\n"
        "def make():\n    return M(), (torch.randn(2, 3),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run(["export", "net.py:make", "-o", "m.onnx", "--target", "openvino"]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "OpenVINO would not compute 1 of 2 nodes" in printed
    assert "1 IsNaN: no kernel; left to the CPU, at net.py:6" in printed


@cache
def _versions(name: str) -> set[str]:
    return {str(s.since_version) for s in onnx.defs.get_all_schemas_with_history() if (s.name, s.domain) == (name, "")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.long
def test_tables_are_whole(target: str) -> None:
    table = load(target)
    assert table["target"] == target
    assert table["title"]
    assert table["asked"]
    names = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    if "types" in table:  # a table from documentation
        assert table["reference"].startswith("https://")
        assert "no provider was asked" in table["asked"]
        assert {*table["refused"]} <= {*table["types"]} <= names
        for name, text in table["types"].items():
            types = documented_types(text)
            assert all(letters and DTYPES.keys() >= {*letters} for letters in types.values()), name
            assert {version for version in types if version} <= _versions(name), name
        return
    assert {*table["operators"], *table["absent"]} <= names
    for name, versions in table["operators"].items():
        assert {*versions} <= _versions(name), name
        for row in versions.values():
            assert row.keys() == {"known", "refused", "breaks"}
            assert row["known"]
            assert all(row["refused"])
            assert all(len(item) > 1 for item in row["breaks"])
