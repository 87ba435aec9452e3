"""Pieces as an ensemble of Triton, run by their configurations, which Triton's own schema reads.

``make test-fleet`` has the schema.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format
from torch import nn

import onnxplug

tritonclient = pytest.importorskip("tritonclient", reason="tritonclient is not installed; make test-fleet installs it")
#: ONNX Runtime's names of the types.
TYPES = {"TYPE_FP32": "tensor(float)", "TYPE_INT64": "tensor(int64)", "TYPE_BOOL": "tensor(bool)"}


@pytest.fixture(scope="module")
def schema() -> Any:
    """The module of Triton's messages, without the client, which needs grpc."""
    path = Path(tritonclient.__file__).parent / "grpc/model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(schema: Any, folder: Path, name: str) -> Any:
    text = (folder / name / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, schema.ModelConfig())
    assert config.name == name
    assert (folder / name / "1").is_dir()
    return config


def check_tensors(schema: Any, declared: Any, values: list[Any]) -> None:
    """Checks that the tensors of a configuration are the tensors of a file."""
    assert [tensor.name for tensor in declared] == [value.name for value in values]
    for tensor, value in zip(declared, values, strict=True):
        assert TYPES[schema.DataType.Name(tensor.data_type)] == value.type
        assert list(tensor.dims) == [size if isinstance(size, int) else -1 for size in value.shape]


def served(schema: Any, folder: Path, name: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The ensemble's results, computed step by step by its configuration."""
    ensemble = configuration(schema, folder, name)
    assert ensemble.platform == "ensemble"
    values = {tensor.name: inputs[tensor.name] for tensor in ensemble.input}
    steps = ensemble.ensemble_scheduling.step
    taken = {value for step in steps for value in step.input_map.values()} | {tensor.name for tensor in ensemble.output}
    assert {*values, *(value for step in steps for value in step.output_map.values())} == taken
    for tensor in ensemble.input:
        fixed = [(size, of) for size, of in zip(tensor.dims, values[tensor.name].shape, strict=True) if size != -1]
        assert all(size == of for size, of in fixed)
    for step in steps:
        piece = configuration(schema, folder, step.model_name)
        assert piece.backend == "onnxruntime"
        session = onnxruntime.InferenceSession(str(folder / step.model_name / "1/model.onnx"))
        check_tensors(schema, piece.input, session.get_inputs())
        check_tensors(schema, piece.output, session.get_outputs())
        assert set(step.input_map) == {tensor.name for tensor in piece.input}
        feeds = {key: values[value] for key, value in step.input_map.items()}
        for tensor, result in zip(piece.output, session.run(None, feeds), strict=True):
            if tensor.name in step.output_map:
                assert step.output_map[tensor.name] not in values, "a tensor of an ensemble is made once"
                values[step.output_map[tensor.name]] = result
    return {tensor.name: values[tensor.name] for tensor in ensemble.output}


class Translator(nn.Module):
    """An encoder that is called twice, a decoder, and a head with an unused result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.head = Head()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.encoder(self.encoder(self.embedding(source)))
        scores, _ = self.head(self.decoder(self.embedding(target), memory=memory))
        return {"scores": scores, "memory": memory}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 20)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x > 0


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 20, (batch, length))


@pytest.mark.parametrize("external_data", [None, True])
def test_an_ensemble(schema: Any, external_data: bool | None, tmp_path: Path) -> None:
    model = Translator().eval()
    shapes = {"source": {0: "batch", 1: "source"}, "target": {0: "batch", 1: "target"}}
    names = ["embedding", "encoder", "decoder", "head"]
    pieces = onnxplug.to_onnx(model, (tokens(2, 5), tokens(2, 7)), pieces=names, dynamic_shapes=shapes)
    files = pieces.save_triton(tmp_path / "models", "translator", external_data=external_data)
    assert {file for file in (tmp_path / "models").rglob("*") if file.suffix in (".onnx", ".pbtxt")} == set(files)
    for source, target in ((tokens(2, 5), tokens(2, 7)), (tokens(3, 9), tokens(3, 4))):
        inputs = {"source": source.numpy(), "target": target.numpy()}
        results = served(schema, tmp_path / "models", "translator", inputs)
        with torch.no_grad():
            expected = model(source, target)
        assert list(results) == ["output_0", "output_1"]
        torch.testing.assert_close([torch.from_numpy(v) for v in results.values()], list(expected.values()))


def test_static_sizes_and_a_result_that_nothing_takes(schema: Any, tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), Head()
            self.unused = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.unused(y)
            return self.one(x)

    model = Two().eval()
    x = torch.randn(2, 4)
    pieces = onnxplug.to_onnx(model, (x, torch.randn(2, 4)), pieces=["one", "unused"])
    pieces.save_triton(tmp_path, "two")
    ensemble = configuration(schema, tmp_path, "two")
    assert [(tensor.name, list(tensor.dims)) for tensor in ensemble.input] == [("x", [2, 4])]
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == ["two_one"]
    for values in (x, torch.randn(2, 4)):
        results = served(schema, tmp_path, "two", {"x": values.numpy()})
        torch.testing.assert_close(torch.from_numpy(results["output"]), model(values, values).detach())
