"""Doubles with numbers that ONNX would keep as float32 attributes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.support.check import check

B = torch.linspace(-1, 1, 5, dtype=torch.float64)
W = torch.linspace(-1, 2, 30, dtype=torch.float64).view(6, 5)
SPREAD = torch.linspace(1e-4, 2e-4, 4, dtype=torch.float64)
EXTREMES = [math.nan, math.inf, -math.inf, -0.0, 1e-9, -1e-9, 1e300, -1e300, 3.0, -3.0, 2.999999999, -2.999999999]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: F.elu(x, 0.3),
    "elu of one": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "leaky_relu downwards": lambda x: F.leaky_relu(x, -0.3),
    "leaky_relu beyond float32": lambda x: F.leaky_relu(x, 1e60),
    "rrelu": F.rrelu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
}
LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "addmm": lambda x: torch.addmm(B, x[0], W, alpha=0.1, beta=0.3),
    "addmm without the first": lambda x: torch.addmm(B, x[0], W, alpha=0.1, beta=0),
    "addmm of whole numbers": lambda x: torch.addmm(B, x[0], W, alpha=3, beta=0.5),
    "batch_norm": lambda x: F.batch_norm(x, SPREAD, SPREAD, SPREAD, SPREAD, eps=1e-5),
    "layer_norm": lambda x: F.layer_norm(x * 1e-3, (6,), x[0, 0], x[0, 1], eps=1e-5),
    "layer_norm by a power of 2": lambda x: F.layer_norm(x * 1e-3, (4, 6), eps=2**-20),
    "instance_norm": lambda x: F.instance_norm(x * 1e-3, weight=SPREAD, bias=SPREAD, eps=1e-5),
    "group_norm": lambda x: F.group_norm(x * 1e-3, 2, SPREAD, SPREAD, eps=1e-5),
    "rms_norm": lambda x: F.rms_norm(x * 1e-3, (6,), x[0, 0], eps=1e-5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.3),
    "attention of any width": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, seeded: None) -> None:
    x, y = torch.randn(3, 4, 6, dtype=torch.float64) * 3, torch.tensor(EXTREMES, dtype=torch.float64)
    check(ACTIVATIONS[name], x, dynamic=({0: "rows"},), others=[(y.view(1, 2, 6).repeat(1, 2, 1),)])


@pytest.mark.parametrize("opset", [None, 23])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, opset: int | None, seeded: None) -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    others = [(torch.randn(2, 4, 6, dtype=torch.float64) * 2,)]
    check(LAYERS[name], x, dynamic=({0: "rows"},), others=others, opset=opset, target="onnxruntime")


def test_attention_of_dynamic_width(seeded: None) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    x, y = (torch.randn(2, 3, 4, width, dtype=torch.float64) for width in (6, 10))
    check(model, x, dynamic=({3: "width"},), others=[(y,)], target="onnxruntime")
