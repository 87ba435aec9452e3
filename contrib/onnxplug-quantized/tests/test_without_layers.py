"""Functions that quantise numbers, and computations with their results, in models without a quantised layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from onnxplug.errors import CaptureError
from tests.support.check import check

pytestmark = pytest.mark.usefixtures("seeded")
ROWS = {0: torch.export.Dim.DYNAMIC}
SCALES, ZEROS = torch.tensor([0.1, 0.2, 0.3, 0.25]), torch.tensor([100, 0, 255, 128])
SYMMETRIC = torch.zeros(4, dtype=torch.int64)


def q(x: torch.Tensor, scale: float = 0.25, zero_point: int = 10, dtype: torch.dtype = torch.quint8) -> Any:
    return torch.quantize_per_tensor(x, scale, zero_point, dtype)


def by_channel(x: torch.Tensor, axis: int = 1) -> Any:
    return torch.quantize_per_channel(x, SCALES, ZEROS, axis, torch.quint8)


def signed(x: torch.Tensor) -> Any:
    return torch.quantize_per_channel(x, SCALES, SYMMETRIC, 1, torch.qint8)


def several(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.quantize_per_tensor([x, x * 2], SCALES[:2], ZEROS[:2], torch.quint8)
    return torch.cat([first.dequantize(), second.dequantize()])


def written(x: torch.Tensor) -> torch.Tensor:
    scale, zero_point = q(x).q_scale(), q(x).q_zero_point()
    return (q(x).int_repr().float() - zero_point) * scale


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "integers": lambda x: q(x).int_repr(),
    "integers, signed": lambda x: q(x, zero_point=-3, dtype=torch.qint8).int_repr(),
    "integers, 32 bits": lambda x: q(x, 1e-3, 0, torch.qint32).int_repr(),
    "integers, written": lambda x: (q(x).int_repr().add_(1), q(x).int_repr()),
    "scale": lambda x: q(x).q_scale() * x,
    "zero point": lambda x: q(x).q_zero_point() + x,
    "by hand": written,
    "scheme": lambda x: x * (q(x).qscheme() == torch.per_tensor_affine) + (signed(x).qscheme() == torch.per_channel_affine),
    "dtype": lambda x: x * (q(x).is_quantized and q(x).dtype == torch.quint8),
    "channels": lambda x: by_channel(x).dequantize(),
    "channels, signed": lambda x: signed(x).dequantize(),
    "channels, integers": lambda x: (by_channel(x).int_repr(), signed(x).int_repr()),
    "channels, parameters": lambda x: (
        by_channel(x).q_per_channel_scales() * x, by_channel(x).q_per_channel_zero_points() + x, signed(x).q_per_channel_axis()
    ),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False).dequantize(),
    "dynamic, reduced": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, True).int_repr(),
    "several": several,
    "several, restored": lambda x: torch.cat(torch.dequantize([q(x), signed(x)])),
    "relu": lambda x: q(x).relu().dequantize(),
    "mean": lambda x: q(x).mean().dequantize(),
    "compared": lambda x: (q(x) > 0.5, q(x) == q(x.flip(0))),
    "joined": lambda x: torch.cat([q(x), q(x, 0.5)]).dequantize(),
    "sorted": lambda x: q(x).sort()[0].int_repr(),
    "topk": lambda x: q(x).topk(2)[0].dequantize(),
    "pooled": lambda x: F.max_pool2d(q(x)[None, None], (1, 2)).int_repr(),
    "padded": lambda x: F.pad(q(x), (1, 1)).dequantize(),
    "clamped": lambda x: torch.clamp(q(x), -1.0, 2.0).int_repr(),
    "moved": lambda x: q(x).t().reshape(2, -1).int_repr(),
    "sigmoid": lambda x: torch.sigmoid(q(x)).int_repr(),
}  # fmt: skip

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * 9
OTHERS = [(X[:3] * -3.7,), (torch.full((1, 4), 0.013),)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    check(FUNCTIONS[name], X, others=OTHERS, dynamic=[ROWS], rtol=1e-6, atol=1e-6)


class Layer(torch.nn.Module):
    """A user's own layer: a product with weights that are quantised by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.weight.abs().amax(1) / 127
        weight = torch.quantize_per_channel(self.weight, scales, SYMMETRIC, 0, torch.qint8)
        return F.linear(q(x, 0.05, 120).dequantize(), weight.dequantize()), F.relu(q(x)).int_repr()


def test_layer_of_ones_own() -> None:
    check(Layer(), torch.randn(3, 8), others=[(torch.randn(5, 8) * 3,)], dynamic=[ROWS], atol=1e-5, verify=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.quantize_per_channel(x, SCALES, SCALES, 1, torch.quint8).dequantize(), "no integers"),
        (lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize(), "quint8"),
        (lambda x: by_channel(x), "quantised"),
        (lambda x: by_channel(x).t().dequantize(), "scale for each channel"),
    ],
)
def test_refused(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        onnxplug.to_onnx(function, (X,))


def test_an_error_names_the_line_of_the_model() -> None:
    with pytest.raises(CaptureError, match=rf"{Path(__file__).name}:\d+: RuntimeError") as error:
        onnxplug.to_onnx(lambda x: F.max_pool2d(q(x)[None, None], 9).dequantize(), (X,))
    assert "onnxplug_quantized" not in error.value.message
