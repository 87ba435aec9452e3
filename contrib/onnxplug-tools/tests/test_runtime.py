"""``onnxplug.runtime``: the models that it takes."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.helper as oh
from onnxplug_tools.onnx_file import read_model
from onnxplug_tools.runtime import custom_op_libraries, inference_session

from tests.support.onnx_files import made


def test_a_path_in_bytes(tmp_path: Path) -> None:
    onnx.save(made([oh.make_node("Relu", ["x"], ["y"])]), tmp_path / "m.onnx")
    (entry,) = os.scandir(os.fsencode(tmp_path))
    assert [value.name for value in inference_session(entry).get_outputs()] == ["y"]
    assert custom_op_libraries(entry) == []
    assert read_model(entry).graph.name == "g"
