"""Files for tools that run after an export: they know the default form (``make consumers`` runs more of them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxplug
from tests.support.check import check


class Layer(nn.Module):
    """A convolution, attention with a boolean mask, and both kinds of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv1d(3, 32, 3, padding=1), nn.BatchNorm1d(32))
        self.query, self.key_value, self.out = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.norm, self.scale = nn.LayerNorm(32), nn.Parameter(torch.rand(32))
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Pieces [batch, 3, length], of which those are seen, [batch, length]."""
        x = self.patches(x).mT
        key, value = self.key_value(x).chunk(2, -1)
        mask = seen[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        heads = F.scaled_dot_product_attention(*(y[:, None] for y in (self.query(x), key, value)), attn_mask=mask)
        x = self.norm(x + self.out(heads[:, 0]))
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.narrow(F.gelu(self.wide(normal)))


def sample(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, length), torch.arange(length).expand(batch, length) <= 2


def exported(**options: Any) -> onnxplug.OnnxProgram:
    dims = {0: torch.export.Dim("batch"), 2: torch.export.Dim("length")}
    dynamic = (dims, {0: dims[0], 1: dims[2]})
    torch.manual_seed(0)
    return check(Layer().eval(), *sample(2, 7), others=[sample(3, 5), sample(1, 9)], dynamic=dynamic, **options)


def operators(program: onnxplug.OnnxProgram) -> list[str]:
    return [node.op_type for node in program.model.graph]


@pytest.mark.parametrize("target", [None, "onnxruntime", "onnxruntime:cpu"])
def test_the_canonical_form(target: str | None) -> None:
    program = exported(target=target)
    result = operators(program)
    tuned = target == "onnxruntime:cpu"
    assert result.count("Gemm") == (5 if tuned else 0)
    assert result.count("MatMul") == (3 if tuned else 7)
    assert result.count("Sum") == (1 if tuned else 0)
    assert [result.count(op) for op in ("Conv", "BatchNormalization", "LayerNormalization", "Gelu", "Pow")] == [
        1,
        0,
        1,
        1,
        1,
    ]
    assert not [node for node in program.model.graph if node.op_type == "Cast"]


class Reader:
    """Calibration data: one sample."""

    def __init__(self, names: list[str]) -> None:
        self._samples = [dict(zip(names, (x.numpy() for x in sample(2, 7)), strict=True))]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._samples.pop() if self._samples else None

    def rewind(self) -> None:
        pass


@pytest.fixture(scope="module", params=["short", "full"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("consumers") / "model.onnx"
    exported(metadata=request.param).save(path)
    return path


def kinds(path: Path) -> list[str]:
    """The operators of a file that ONNX Runtime loads."""
    import onnxruntime

    onnxruntime.InferenceSession(path)
    return [node.op_type for node in onnx.load(path).graph.node]


def test_dynamic_quantisation(file: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file, tmp_path / "model.onnx", weight_type=QuantType.QUInt8)
    assert kinds(tmp_path / "model.onnx").count("MatMulInteger") == 5


def test_quantisation_for_qnn(file: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    prepared, made = tmp_path / "prepared.onnx", tmp_path / "model.onnx"
    source = str(prepared if qnn_preprocess_model(file, prepared) else file)
    reader = Reader([x.name for x in onnx.load(file).graph.input])
    quantize(source, str(made), get_qnn_qdq_config(source, reader))
    assert "QuantizeLinear" in kinds(made)


def test_four_bits(file: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(file), block_size=32)
    quantizer.process()
    quantizer.model.save_model_to_file(str(tmp_path / "model.onnx"))
    assert kinds(tmp_path / "model.onnx").count("MatMulNBits") == 5


def test_float16(file: Path, tmp_path: Path) -> None:
    """onnxconverter-common's conversion does not change the type that a Cast names."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(file)), tmp_path / "model.onnx")
    assert "MatMul" in kinds(tmp_path / "model.onnx")


def test_symbolic_shapes(file: Path) -> None:
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    inferred = SymbolicShapeInference.infer_shapes(onnx.load(file))
    known = {info.name for info in inferred.graph.value_info if info.type.tensor_type.HasField("shape")}
    assert {name for node in inferred.graph.node for name in node.output} <= known | {
        x.name for x in inferred.graph.output
    }
