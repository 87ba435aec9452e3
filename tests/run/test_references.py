"""Which data files a model refers to, wherever in it a tensor stands."""

from __future__ import annotations

import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnxplug.run.references import data_files, folder_references


def external(location: str) -> TensorProto:
    tensor = TensorProto(name=location, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("offset", "0"), ("location", location), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def model() -> onnx.ModelProto:
    """Tensors of a graph, of an attribute, of a branch, of a function's body and of a sparse initializer."""
    branch = helper.make_graph(
        [helper.make_node("Identity", ["branch"], ["b"])],
        "branch",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [4])],
        initializer=[external("branch")],
    )
    nodes = [
        helper.make_node("Constant", [], ["c"], value=external("./attribute")),
        helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        initializer=[external("graph.data"), helper.make_tensor("inside", TensorProto.FLOAT, [2], [1.0, 2.0])],
    )
    graph.sparse_initializer.add(values=external("sub/../values"), indices=external("indices"))
    body = [helper.make_node("Constant", [], ["z"], value=external("body"))]
    function = helper.make_function("d", "F", [], ["z"], body, [helper.make_opsetid("", 21)])
    return helper.make_model(graph, functions=[function])


FOUND = {"graph.data", "attribute", "branch", "values", "indices", "body"}


def test_every_place_of_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model().SerializeToString())
    assert data_files(path) == FOUND
    path.write_bytes(b"")
    assert data_files(path) == set()


@pytest.mark.parametrize("content", [b"text", b"\x00" * 100, b"\x08\x0a", model().SerializeToString()[:-40]])
def test_what_is_no_whole_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert data_files(path) is None
    found = folder_references(tmp_path, "other.onnx")
    assert found.unreadable == ("model.onnx",)
    assert found.may_include("anything")
    assert not found.include("anything")


def test_which_files_of_a_folder_are_models(tmp_path: Path) -> None:
    content = model().SerializeToString()
    (tmp_path / "notes.txt").write_bytes(content)
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "model.onnx.json").write_text("{}", encoding="utf-8")
    assert folder_references(tmp_path, "net.pb") == (frozenset(), ())
    for name in ("a.onnx", "a.onnx.bak", "other.pb"):
        (tmp_path / name).write_bytes(content)
        assert folder_references(tmp_path, "net.pb") == (frozenset(FOUND), ())
        (tmp_path / name).unlink()
    (tmp_path / "noending").write_bytes(content)
    assert folder_references(tmp_path, "noending").names == FOUND


def test_weights_are_not_read_as_a_model(tmp_path: Path) -> None:
    """A data file whose weights begin with many zeros, and one that is larger than any model, take no time."""
    path = tmp_path / "model.onnx.data"
    for size in (1 << 27, 1 << 33):
        with open(path, "wb") as file:
            file.truncate(size)
        started = time.process_time()
        assert data_files(path) is None
        assert time.process_time() - started < 1, "it takes a minute to read 128 MB byte by byte"
