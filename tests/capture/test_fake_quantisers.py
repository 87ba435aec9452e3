"""Models of quantisation-aware training in evaluation: each fake quantiser is a QuantizeLinear and a DequantizeLinear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import onnxplug


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.convolution, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.linear, self.sigmoid = nn.Linear(8, 4), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.convolution(self.quant(x))))
        return self.dequant(self.sigmoid(self.linear(x.mean((2, 3)))))


def plain(qscheme: torch.qscheme, observer: Any) -> Any:
    kind = quantization.FakeQuantize
    return quantization.QConfig(
        activation=kind.with_args(observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
        weight=kind.with_args(observer=observer, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=qscheme),
    )


def learnable() -> Any:
    kind, observer = _LearnableFakeQuantize, quantization.MovingAverageMinMaxObserver
    return quantization.QConfig(
        activation=kind.with_args(observer=observer, quant_min=0, quant_max=255),
        weight=kind.with_args(
            observer=observer, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
        ),
    )


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "fused": lambda: quantization.get_default_qat_qconfig("fbgemm"),
    "qnnpack": lambda: quantization.get_default_qat_qconfig("qnnpack"),
    "plain": lambda: plain(torch.per_tensor_symmetric, quantization.MovingAverageMinMaxObserver),
    "by channel": lambda: plain(torch.per_channel_symmetric, quantization.MovingAveragePerChannelMinMaxObserver),
    "learnable": learnable,
}


def trained(configuration: str) -> nn.Module:
    torch.manual_seed(0)
    model = Network().train()
    model.qconfig = CONFIGURATIONS[configuration]()  # type: ignore[assignment]
    model = quantization.prepare_qat(quantization.fuse_modules_qat(model, [["convolution", "norm", "relu"]]))
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8))
    return model.eval()


def without_observers(model: nn.Module) -> nn.Module:
    model.apply(quantization.disable_observer)
    for module in model.modules():
        if isinstance(module, _LearnableFakeQuantize):
            module.toggle_observer_update(False)
    return model


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_trained_models_keep_their_scales(configuration: str) -> None:
    model = without_observers(trained(configuration))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "batch"},), verify=True)
    operators = program.statistics.operators
    assert operators["QuantizeLinear"] == operators["DequantizeLinear"] == 6  # four activations and two weights
    assert [slot.name for slot in program.outputs] == ["output"]
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("configuration", ["fused", "plain", "learnable"])
def test_a_fake_quantiser_that_observes_is_refused(configuration: str) -> None:
    with pytest.raises(onnxplug.CaptureError, match=r"'quant.activation_post_process' observes[\s\S]*Keep the scales"):
        onnxplug.to_onnx(trained(configuration), (torch.randn(2, 3, 8, 8),))


def test_fake_quantisers_that_are_off() -> None:
    model = without_observers(trained("fused"))
    model.apply(quantization.disable_fake_quant)
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 8, 8),), verify=True)
    assert "QuantizeLinear" not in program.statistics.operators


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fused_operator_of_a_program_that_torch_export_captured(enabled: bool) -> None:
    model = quantization.FusedMovingAvgObsFakeQuantize()
    model(torch.randn(4, 8))
    model = without_observers(model).eval()
    model.enable_fake_quant(enabled)
    x = torch.randn(4, 8)
    program = onnxplug.to_onnx(torch.export.export(model, (x,)), mutations="ignore")
    torch.testing.assert_close(program(x)[0], model(x))
    assert ("QuantizeLinear" in program.statistics.operators) == enabled
    model.enable_observer()
    with pytest.raises(onnxplug.OnnxplugError, match="a fake quantiser that observes"):
        onnxplug.to_onnx(torch.export.export(model, (x,)))


@pytest.mark.parametrize("zero_point", [3.0, 3.4, 2.5, -7.0, 300.0])
def test_zero_points_that_are_learnt_are_rounded_as_torch_does(zero_point: float) -> None:
    x, scale, shift = torch.randn(4, 8) * 10, torch.tensor([0.1]), torch.tensor([zero_point])
    ops: Any = torch.ops.aten

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_channel = ops._fake_quantize_learnable_per_channel_affine(x, scale.expand(4), shift.expand(4), 0, 0, 255)
        return ops._fake_quantize_learnable_per_tensor_affine(x, scale, shift, 0, 255), by_channel

    onnxplug.to_onnx(forward, (x,), verify=True)
