"""Whole models that torch.ao.quantization converts: eager mode, with training, and FX graph mode."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization as tq
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import onnxplug
from tests.support.quantised import ROWS, check_quantised, engine

IMAGE = (2, 3, 8, 8)


@pytest.fixture(autouse=True)
def _setting(seeded: None) -> Iterator[None]:
    with engine("fbgemm"):
        yield


class Net(nn.Module):
    """Convolutions with batch norm, an added branch, a joined branch, pools, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = tq.QuantStub(), tq.DeQuantStub()
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 1)
        self.joined, self.added = FloatFunctional(), FloatFunctional()
        self.act, self.last = nn.Hardswish(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.first(self.quant(x))))
        x = self.added.add(x, self.second(x))
        x = self.joined.cat([self.act(x), self.third(x)], 1)
        x = nn.functional.adaptive_avg_pool2d(nn.functional.max_pool2d(x, 2), 1).flatten(1)
        return self.dequant(self.last(x))


def setting() -> Any:
    return tq.get_default_qconfig("fbgemm")


def calibrated(prepared: nn.Module) -> nn.Module:
    for _ in range(3):
        prepared(torch.randn(4, *IMAGE[1:]))
    return prepared


def eager() -> nn.Module:
    model = tq.fuse_modules(Net().eval(), [["first", "norm", "relu"]])
    model.qconfig, model.third.qconfig = setting(), tq.default_qconfig
    return tq.convert(calibrated(tq.prepare(model)))


def trained() -> nn.Module:
    model = tq.fuse_modules_qat(Net().train(), [["first", "norm", "relu"]])
    model.qconfig, model.third.qconfig = tq.get_default_qat_qconfig("fbgemm"), tq.default_qat_qconfig
    return tq.convert(calibrated(tq.prepare_qat(model)).eval())


class Plain(nn.Module):
    """A model for FX graph mode: without stubs, and with functions whose weights are parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.other = nn.Conv2d(8, 8, 1)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8) * 0.3), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        x = torch.cat([x + self.other(x), x * 1.7], 2)
        return nn.functional.linear(x.mean([2, 3]), self.weight, self.bias)


def graph_mode() -> nn.Module:
    mapping = tq.get_default_qconfig_mapping("fbgemm")
    prepared = prepare_fx(Plain().eval(), mapping, (torch.randn(IMAGE),))
    return convert_fx(calibrated(prepared))


@pytest.mark.parametrize("make", [eager, trained, graph_mode])
def test_converted(make: Any) -> None:
    model = make()
    with torch.no_grad():
        results = model(torch.randn(64, *IMAGE[1:]))
    quantum = float(results.unique().diff().min())
    assert quantum > 1e-6
    others = [(torch.randn(5, *IMAGE[1:]) * 2,), (torch.randn(1, *IMAGE[1:]),)]
    program = check_quantised(model, (torch.randn(IMAGE),), others, quantum=quantum, share=0.1, verify=True)
    stored = {v.dtype for v in program.model.graph.initializers.values() if v.shape is not None and len(v.shape) > 1}
    assert {str(dtype) for dtype in stored} == {"INT8"}


def test_exports_again_and_in_a_script() -> None:
    model = eager()
    x = torch.randn(IMAGE)
    before = model(x)
    first, second = (onnxplug.to_onnx(model, (x,), dynamic_shapes=(ROWS,)) for _ in range(2))
    assert [n.op_type for n in first.model.graph] == [n.op_type for n in second.model.graph]
    assert torch.equal(model(x), before)
    assert torch.equal(copy.deepcopy(model)(x), before)


def drawn(name: str, side: int) -> nn.Module:
    """A quantised model of torchvision, calibrated, with random weights, biases and statistics of batch norms.

    Batch norms move most numbers above 0, where ReLU passes differences unchanged: with kaiming's weights alone a
    network of this depth is chaotic, and one flipped quantum changes all results.
    """
    models = importlib.import_module("torchvision.models.quantization")
    settings = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(models, name)(weights=None, quantize=False, **settings)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.3, 0.6)
            nn.init.uniform_(module.bias, 0.2, 1.2)
            module.momentum = None
        elif isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
    images = torch.randn(8, 3, side, side)
    with torch.no_grad():
        model.train()(images)
        model.eval().fuse_model(is_qat=False)
        model.qconfig = setting()
        tq.prepare(model, inplace=True)(images)
    return tq.convert(model, inplace=True)


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


LARGE = ["resnet18", "resnet50", "resnext101_32x8d", "googlenet", "inception_v3", "mobilenet_v3_large"]


@pytest.mark.long
@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", *(pytest.param(n, marks=pytest.mark.long) for n in LARGE)])
def test_torchvision(name: str) -> None:
    """The export differs at most 1.5 times as much as PyTorch itself where one input in 500 is one quantum higher."""
    side = 96 if name == "inception_v3" else 64
    model = drawn(name, side)
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, side, side),), dynamic_shapes=(ROWS,), verify=True)
    kinds = [node.op_type for node in program.model.graph]
    assert kinds.count("Conv") > 15
    assert not {kind for kind in kinds if "Integer" in kind}
    for rows in (2, 5):
        x = torch.randn(rows, 3, side, side)
        higher = torch.where(torch.rand(x.shape) < 1 / 500, x + float(model.quant.scale), x)
        results, (got,) = model(x), program(x)
        assert spread(got, results) <= 1.5 * spread(model(higher), results)
        assert spread(got, results) < 0.2 * float(results.std())
