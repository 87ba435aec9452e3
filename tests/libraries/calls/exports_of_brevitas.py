"""``export_onnx_qcdq`` and ``export_qonnx`` of brevitas: quantised layers and networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import brevitas.nn as qnn
import pytest
import torch
from brevitas.export import export_onnx_qcdq, export_qonnx
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int32Bias, Uint8ActPerTensorFloat
from torch import nn

from tests.libraries.compare import assert_same

_WEIGHTS = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "QuantLinear": (lambda: qnn.QuantLinear(8, 4, bias=True), (8,)),
    "QuantLinear, inputs too": (lambda: qnn.QuantLinear(8, 4, bias=True, **_WEIGHTS), (8,)),
    "QuantLinear, bias too": (lambda: qnn.QuantLinear(8, 4, bias=True, bias_quant=Int32Bias, **_WEIGHTS), (8,)),
    "QuantLinear of 4 bits": (lambda: qnn.QuantLinear(8, 4, bias=False, weight_bit_width=4), (8,)),
    "QuantConv2d": (lambda: qnn.QuantConv2d(3, 4, 3, bias=True, **_WEIGHTS), (3, 8, 8)),
    "QuantConvTranspose2d": (lambda: qnn.QuantConvTranspose2d(3, 4, 3, bias=True), (3, 8, 8)),
    "QuantReLU": (lambda: nn.Sequential(nn.Linear(8, 4), qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat)), (8,)),
    "QuantIdentity": (lambda: qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat), (8,)),
    "network": (
        lambda: nn.Sequential(
            qnn.QuantConv2d(3, 4, 3, bias=True, **_WEIGHTS),
            nn.BatchNorm2d(4),
            qnn.QuantReLU(),
            nn.Flatten(),
            qnn.QuantLinear(144, 5, bias=True),
        ),
        (3, 8, 8),
    ),
}


def calibrated(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network whose quantisers have seen random data."""
    torch.manual_seed(0)
    make, size = NETWORKS[name]
    model = make()
    for _ in range(3):
        model(torch.randn(4, *size))
    return model.eval(), size


@pytest.mark.parametrize("name", NETWORKS)
def test_export_onnx_qcdq(name: str, tmp_path: Path) -> None:
    model, size = calibrated(name)
    file = str(tmp_path / "model.onnx")
    export_onnx_qcdq(model, args=torch.randn(2, *size), export_path=file, opset_version=17)
    assert_same(file, model, (torch.randn(2, *size),), (3 * torch.randn(2, *size),))


@pytest.mark.parametrize("name", ["QuantLinear", "QuantConv2d", "QuantReLU", "network"])
def test_export_qonnx(name: str, tmp_path: Path) -> None:
    """ONNX Runtime has no kernel of qonnx's domain: the nodes are counted."""
    model, size = calibrated(name)
    proto = export_qonnx(model, args=torch.randn(2, *size), export_path=str(tmp_path / "model.onnx"))
    quantisers = {"QuantLinear": 1, "QuantConv2d": 2, "QuantReLU": 1, "network": 4}
    assert sum(node.op_type == "Quant" for node in proto.graph.node) == quantisers[name]
