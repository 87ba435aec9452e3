"""Dynamically quantised layers: numbers go in and out, and the scale of the activations is taken from their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.quantized.tensor import QTensor
from onnxplug.capture.quantized.weighted import convolution, linear
from onnxplug.capture.quantized.weights import Packed

Function = Callable[..., Any]
_OPS = torch.ops.quantized_decomposed
#: The least scale that torch's kernels choose.
_LEAST = 6.1e-5


def _range_of(x: Tensor, packed: Packed, reduce_range: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of 256 steps from the least to the greatest number, 0 among them; of 128 for a reduced range."""
    reduce_range = reduce_range and packed.heeds_range
    found: tuple[Tensor, Tensor] = _OPS.choose_qparams.tensor(x, 0, 127 if reduce_range else 255, _LEAST, torch.uint8)
    return found


def _rounded(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return QTensor.of(x, scale, zero_point, torch.quint8).numbers


def _product(x: Tensor, packed: Packed, reduce_range: bool) -> Tensor:
    halves = packed.dtype == torch.float16
    return linear(x if halves else _rounded(x, *_range_of(x, packed, reduce_range)), packed)


def _linear(relu: bool) -> Function:
    def convert(_: Function, x: Tensor, packed: Packed, reduce_range: bool = False) -> Tensor:
        y = _product(x, packed, reduce_range)
        return y.relu() if relu else y

    return convert


def _convolution(_: Function, x: Tensor, packed: Packed, reduce_range: bool = False) -> Tensor:
    """The kernel quantises its result with the scale of the operand, and so limits it to the operand's range."""
    parameters = _range_of(x, packed, reduce_range)
    return _rounded(convolution(_rounded(x, *parameters), packed), *parameters)


TABLE: dict[str, Function] = {
    **{f"quantized::linear_dynamic{half}": _linear(False) for half in ("", "_fp16")},
    **{f"quantized::linear_relu_dynamic{half}": _linear(True) for half in ("", "_fp16")},
    **{f"quantized::conv{kind}{n}d_dynamic": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
}
