"""Linears quantised by torchao export and match eager PyTorch."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check
from tests.support.tolerances import looser

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao import quantization
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86


def _packed_by_torch() -> Any:
    """A config that the releases of torchao for torch before 2.13 lack."""
    module = pytest.importorskip("torchao.prototype.quantization.int4")
    return module.PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)


CONFIGS: dict[str, Any] = {
    "int8_weight_only": quantization.Int8WeightOnlyConfig,
    "int8_dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
    "float8_weight_only": quantization.Float8WeightOnlyConfig,
    "int4_in_int8": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "int4_groups": lambda: quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
    ),
    "int4_asymmetric": lambda: quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=quantization.PerGroup(32),
        mapping_type=quantization.MappingType.ASYMMETRIC,
    ),
    "int3_groups": lambda: quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=quantization.PerGroup(16)
    ),
    "int4_packed_by_torch": _packed_by_torch,
    "int8_activation_int4_weight": lambda: quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
}


#: Configs whose weights are stored in four bits, among those whose linears are restored as a whole.
NIBBLES = {"int4_in_int8", "int4_groups", "int4_asymmetric", "int3_groups", "int4_packed_by_torch"}


def quantised(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval().to(dtype)
    quantization.quantize_(model, CONFIGS[name]())
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [18, 21, 24])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_linears(name: str, opset: int) -> None:
    if name == "float8_weight_only":
        opset = max(opset, 19)  # ai.onnx has no 8-bit floats before
    program = check(
        quantised(name),
        torch.randn(4, 64),
        others=[(torch.randn(9, 64) * 3,), (torch.randn(1, 64),)],
        dynamic=({0: torch.export.Dim.DYNAMIC},),
        opset=opset,
        **looser("quantised layers"),
    )
    stored = [v.dtype for v in program.model.graph.initializers.values()]
    if opset >= 21 and name in NIBBLES:
        assert [node.op_type for node in program.model.graph].count("DequantizeLinear") == 2
        assert not {ir.DataType.INT8, ir.DataType.UINT8} & set(stored)
    assert (ir.DataType.INT4 in stored) == (opset >= 21 and ("int4" in name or "int3" in name))


#: Sums of 128 products: torch rounds each linear's result once, and so does the model, from sums in another order.
HALVES = {torch.float16: looser("quantised layers, float16"), torch.bfloat16: looser("quantised layers, bfloat16")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [18, 21, 24])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", sorted(NIBBLES))
def test_half_types(name: str, dtype: torch.dtype, opset: int) -> None:
    check(
        quantised(name, dtype),
        torch.randn(4, 64).to(dtype),
        others=[(torch.randn(9, 64).to(dtype) * 3,), (torch.randn(1, 64).to(dtype),)],
        dynamic=({0: torch.export.Dim.DYNAMIC},),
        opset=opset,
        **HALVES[dtype],
    )


@pytest.mark.filterwarnings("ignore")
def test_half_the_file() -> None:
    """The weights of a larger linear take half a byte each, and ONNX Runtime reads the saved file, its data beside it."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        sizes = {}
        model = nn.Sequential(nn.Linear(512, 256, bias=False)).eval()
        quantization.quantize_(model, CONFIGS["int4_groups"]())
        x = torch.randn(3, 512)
        for opset in (20, 21):
            path = Path(folder) / f"model{opset}.onnx"
            program = onnxplug.to_onnx(model, (x,), path, opset_version=opset, verify=True)
            sizes[opset] = path.stat().st_size
        assert sizes[20] > 512 * 256
        assert sizes[21] < 512 * 256 / 2 + 512 * 256 / 32 * 5 + 4096
        program.save(Path(folder) / "apart.onnx", external_data=True)
        onnx.checker.check_model(str(Path(folder) / "apart.onnx"), full_check=True)
        for name in ("model21.onnx", "apart.onnx"):
            session = onnxruntime.InferenceSession(str(Path(folder) / name), providers=["CPUExecutionProvider"])
            for rows in (x, -2 * x):
                (result,) = session.run(None, {program.model.graph.inputs[0].name: rows.numpy()})
                torch.testing.assert_close(torch.from_numpy(result), model(rows), **looser("restored weights"))


class Convolved(nn.Module):
    """A convolution with its batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 4] of images [batch, 3, height, width]."""
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["static", "dynamic", "trained"])
def test_pt2e(kind: str) -> None:
    """Results of convert_pt2e: scales from data, scales computed at run time, and trained fake quantisation."""
    x, batch = torch.randn(2, 3, 8, 8), torch.export.Dim("batch")
    trained = kind == "trained"
    settings = x86.get_default_x86_inductor_quantization_config(is_qat=trained, is_dynamic=kind == "dynamic")
    quantizer = x86.X86InductorQuantizer().set_global(settings)
    # torchao 0.15 finds layers by metadata that only the strict mode records.
    module = torch.export.export(Convolved().train(trained), (x,), dynamic_shapes=({0: batch},), strict=True).module()
    prepared = (prepare_qat_pt2e if trained else prepare_pt2e)(module, quantizer)
    for _ in range(4):
        prepared(torch.randn(4, 3, 8, 8))
    model = convert_pt2e(prepared)
    if trained:
        move_exported_model_to_eval(model)
    others = [(torch.randn(5, 3, 8, 8) * 3,), (torch.randn(1, 3, 8, 8),)]
    program = check(model, x, others=others, dynamic=({0: batch},), **looser("quantised layers"))
    operators = [node.op_type for node in program.model.graph]
    assert operators.count("QuantizeLinear") == (3 if trained else 2)  # QAT quantises the result too
    stored = {value.dtype for value in program.model.graph.initializers.values()}
    assert {ir.DataType.INT8, ir.DataType.UINT8} & stored
    exported = onnxplug.to_onnx(torch.export.export(model, (x,), dynamic_shapes=({0: batch},)), verify=True)
    for (images,) in others:
        torch.testing.assert_close(exported(images)[0], model(images), **looser("quantised layers"))
