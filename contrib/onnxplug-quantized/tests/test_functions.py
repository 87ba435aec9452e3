"""Functions of quantised tensors: ``torch.ops.quantized``, ``torch.ao.nn.quantized.functional`` and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.functional as QF
import torch.nn.functional as F
from torch import nn

import onnxplug
from onnxplug.errors import CaptureError
from tests.support.quantised import Quantised, check_quantised, engine

IMAGE = (2, 4, 8, 8)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _setting(seeded: None) -> Iterator[None]:
    with engine("fbgemm"):
        yield


#: Functions whose results must be exactly equal.
EXACT: dict[str, Function] = {
    "relu": torch.relu,
    "F.relu": F.relu,
    "relu_inplace": lambda q: F.relu(q, inplace=True),
    "relu6": F.relu6,
    "hardtanh": lambda q: QF.hardtanh(q, -0.5, 0.7),
    "clamp": lambda q: QF.clamp(q, -0.5, 0.7),
    "threshold": lambda q: QF.threshold(q, 0.1, 0.5),
    "F.threshold": lambda q: F.threshold(q, 0.1, 0.5),
    "nn.Threshold": nn.Threshold(-0.2, 0.3),
    "max_pool1d": lambda q: F.max_pool1d(q.flatten(2), 3, 2, 1),
    "max_pool2d": lambda q: QF.max_pool2d(q, 3, 2, 1, ceil_mode=True),
    "nearest": lambda q: QF.interpolate(q, scale_factor=2, mode="nearest"),
    "bilinear": lambda q: F.interpolate(q, scale_factor=2, mode="bilinear"),
    "adaptive_avg_pool2d": lambda q: F.adaptive_avg_pool2d(q, (2, 4)),
    "global_avg_pool": lambda q: F.adaptive_avg_pool2d(q, 1).flatten(1),
    "flatten": lambda q: q.flatten(1),
    "view": lambda q: q.view(q.shape[0], -1),
    "size": lambda q: q.view(q.size(0) * 2, -1),
    "permute": lambda q: q.permute(0, 2, 3, 1).contiguous(),
    "slice": lambda q: q[:, 1:3],
    "chunk": lambda q: torch.cat(q.chunk(2, 1)[::-1], 1),
    "unpacked": lambda q: [x for x in q.unbind(1)][2],  # noqa: C416
    "channel_shuffle": lambda q: F.channel_shuffle(q, 2),
    "pixel_shuffle": lambda q: F.pixel_shuffle(q, 2),
    "pixel_unshuffle": lambda q: F.pixel_unshuffle(q, 2),
    "repeat": lambda q: q.repeat(1, 2, 1, 1),
    "pad": lambda q: F.pad(q, (1, 2, 0, 1)),
    "pad_value": lambda q: F.pad(q, (1, 1), value=0.5),
    "pad_reflect": lambda q: F.pad(q, (1, 1, 1, 1), mode="reflect"),
    "max": lambda q: q.max(1)[0],
    "topk": lambda q: q.topk(2, 1)[0],
    "greater": lambda q: q > 0.5,
    "not_equal": lambda q: q != q.flip(1),
    "cat": lambda q: torch.cat([q, q.flip(2)], 1),
    "int_repr": lambda q: q.int_repr(),
    "parameters": lambda q: q.dequantize() * q.q_scale() + q.q_zero_point(),
    "dropout": lambda q: F.dropout(q, 0.5, training=False),
    "add_scalar": lambda q: torch.ops.quantized.add_scalar(q, 0.5),
    "mul_scalar": lambda q: torch.ops.quantized.mul_scalar(q, 1.7),
    "mul_scalar_negative": lambda q: torch.ops.quantized.mul_scalar(q, -0.7),
    "mul_scalar_zero": lambda q: torch.ops.quantized.mul_scalar(q, 0.0),
    "mul_scalar_relu": lambda q: torch.ops.quantized.mul_scalar_relu(q, -0.7),
    "add_scalar_relu": lambda q: torch.ops.quantized.add_scalar_relu(q, 0.5),
}
#: Functions, and the quantum by which one result in twenty may differ, halfway between two quanta: ``align_corners``
#: has weights of 1/60, so one result in 60 is halfway.
ROUNDED: dict[str, tuple[Function, float]] = {
    "sigmoid": (torch.sigmoid, 1 / 256),
    "tanh": (torch.tanh, 2 / 256),
    "hardsigmoid": (QF.hardsigmoid, 1 / 256),
    "gelu": (F.gelu, 0.0317),
    "hardswish": (lambda q: QF.hardswish(q, 0.0413, 100), 0.0413),
    "elu": (lambda q: QF.elu(q, 0.0413, 100, 0.7), 0.0413),
    "celu": (lambda q: QF.celu(q, 0.0413, 100, 0.7), 0.0413),
    "leaky_relu": (lambda q: QF.leaky_relu(q, 0.137, scale=0.0413, zero_point=100), 0.0413),
    "leaky_relu_same": (lambda q: F.leaky_relu(q, 0.137), 0.0317),
    "avg_pool2d": (lambda q: QF.avg_pool2d(q, 3, 2, 1), 0.0317),
    "avg_pool2d_inside": (lambda q: F.avg_pool2d(q, 3, 2, 1, count_include_pad=False), 0.0317),
    "mean": (lambda q: q.mean([2, 3]), 0.0317),
    "align_corners": (lambda q: F.interpolate(q, size=(7, 11), mode="bilinear", align_corners=True), 0.0317),
    "add_scalar_beyond": (lambda q: torch.ops.quantized.add_scalar(q, 9.0), 0.0317 * 2.2),
    "add_scalar_below": (lambda q: torch.ops.quantized.add_scalar(q, -9.0), 0.0317 * 2.2),
}
OTHERS = [(torch.randn(4, *IMAGE[1:]) * 3,), (torch.randn(1, *IMAGE[1:]) * 0.2,)]


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.qint8 and name.startswith(("max_pool1d", "pixel", "channel")):
        pytest.skip("PyTorch has no such kernel of qint8")
    check_quantised(Quantised(EXACT[name], dtype=dtype), (torch.randn(IMAGE),), OTHERS)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name: str) -> None:
    function, quantum = ROUNDED[name]
    check_quantised(Quantised(function), (torch.randn(IMAGE),), OTHERS, quantum=quantum, share=0.05, verify=True)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "hardsigmoid"])
def test_fixed_scales_of_signed_bytes(name: str) -> None:
    function, quantum = ROUNDED[name]
    model = Quantised(function, dtype=torch.qint8)
    check_quantised(model, (torch.randn(IMAGE),), OTHERS, quantum=quantum, share=0.05)


def functional() -> Any:
    layer = nnq.QFunctional()
    layer.scale, layer.zero_point = 0.0713, 90
    return layer


PAIRS: dict[str, Function] = {
    **{name: (lambda a, b, name=name: getattr(functional(), name)(a, b)) for name in ("add", "mul", "add_relu")},
    "add_broadcast": lambda a, b: functional().add(a, b[:, :, :1]),
    "cat": lambda a, b: functional().cat([a, b], 1),
    "cat_of_torch": lambda a, b: torch.cat([a, b], 1),
    "stack_of_torch": lambda a, b: torch.stack([a, b], 1),
    "matmul": lambda a, b: functional().matmul(a, b),
    "mul_relu": lambda a, b: torch.ops.quantized.mul_relu(a, b, 0.0713, 3),
    "cat_relu": lambda a, b: torch.ops.quantized.cat_relu([a, b], 1, 0.0713, 3),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_operands(name: str) -> None:
    class Pair(Quantised):
        def __init__(self) -> None:
            super().__init__(PAIRS[name], inputs=2)
            self.functional = functional()

    args = (torch.randn(IMAGE), torch.randn(IMAGE))
    others = [(torch.randn(5, *IMAGE[1:]) * 2, torch.randn(5, *IMAGE[1:]) * 3)]
    check_quantised(Pair(), args, others, quantum=0.0713, share=0.01, verify=True)


class Writes(Quantised):
    def forward(self, x: torch.Tensor) -> Any:
        q = self.inputs[0](x)
        part = q[:, :2]
        part.relu_()
        return q.dequantize()


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "exp": (Quantised(lambda q: q.exp()), "exp is called with a quantised tensor"),
    "aliased": (Writes(torch.relu), "relu writes a quantised tensor that may share its memory"),
    "to": (Quantised(lambda q: q.to(torch.float32)), "to is called with a quantised tensor"),
    "add": (Quantised(lambda q: q + 1), "__add__ is called with a quantised tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as error:
        onnxplug.to_onnx(model, (torch.randn(IMAGE),))
    assert error.value.hint


def test_bytes_by_channel() -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales, self.zeros = torch.rand(4).double() * 0.05 + 0.01, torch.tensor([3, 0, 128, 70])
            self.weight = torch.quantize_per_channel(torch.randn(4, 3), self.scales, self.zeros, 0, torch.quint8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.dequantize().t()

    check_quantised(Channels(), (torch.randn(2, 3),), [(torch.randn(5, 3),)])
