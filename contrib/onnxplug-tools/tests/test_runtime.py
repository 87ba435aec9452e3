"""``onnxplug.runtime``: the models that it takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnx.helper as oh
import onnxruntime
import pytest
from onnxplug_tools.onnx_file import read_model
from onnxplug_tools.runtime import custom_op_libraries, inference_session

from onnxplug import UsageError
from tests.support.onnx_files import made


def test_a_path_in_bytes(tmp_path: Path) -> None:
    onnx.save(made([oh.make_node("Relu", ["x"], ["y"])]), tmp_path / "m.onnx")
    (entry,) = os.scandir(os.fsencode(tmp_path))
    assert [value.name for value in inference_session(entry).get_outputs()] == ["y"]
    assert custom_op_libraries(entry) == []
    assert read_model(entry).graph.name == "g"


@pytest.mark.parametrize("call", [inference_session, custom_op_libraries])
def test_bytes_that_are_no_model(call: Any) -> None:
    with pytest.raises(UsageError, match="the serialised model is not an ONNX model that can be read"):
        call(b"some bytes" * 9)
    with pytest.raises(UsageError, match="the serialised model is not a sound ONNX model: it has no graph"):
        call(b"")


def test_the_bytes_of_onnxruntimes_own_format(tmp_path: Path) -> None:
    model = made([oh.make_node("Relu", ["x"], ["y"])])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    content = (tmp_path / "m.ort").read_bytes()
    assert [value.name for value in inference_session(content).get_outputs()] == ["y"]
    assert custom_op_libraries(content) == []


def test_providers_are_a_list() -> None:
    """ONNX Runtime takes the letters of a name for names, none of which it knows, and goes on without."""
    model = made([oh.make_node("Relu", ["x"], ["y"])])
    with pytest.raises(UsageError, match="providers= takes a list, got 'CUDAExecutionProvider'"):
        inference_session(model, providers="CUDAExecutionProvider")
