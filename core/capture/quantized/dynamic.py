"""Dynamically quantised layers: numbers go in and out, and the scale of the activations is taken from their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.quantized.weighted import convolution, linear
from onnxplug.capture.quantized.weights import Cell, Packed
from onnxplug.errors import CaptureError

Function = Callable[..., Any]
_OPS = torch.ops.quantized_decomposed
#: The least scale that torch's kernels choose.
_LEAST = 6.1e-5


def _rounded(x: Tensor, reduce_range: bool) -> Tensor:
    """Numbers in 256 steps between the least and the greatest one, and 0; in 128 where the range is reduced."""
    scale, zero_point = _OPS.choose_qparams.tensor(x, 0, 127 if reduce_range else 255, _LEAST, torch.uint8)
    integers = _OPS.quantize_per_tensor.tensor(x, scale, zero_point, 0, 255, torch.uint8)
    result: Tensor = _OPS.dequantize_per_tensor.tensor(integers, scale, zero_point, 0, 255, torch.uint8)
    return result


def _product(x: Tensor, packed: Packed, reduce_range: bool) -> Tensor:
    halves = packed.dtype == torch.float16
    return linear(x if halves else _rounded(x, reduce_range), packed)


def _linear(relu: bool) -> Function:
    def convert(_: Function, x: Tensor, packed: Packed, reduce_range: bool = False) -> Tensor:
        y = _product(x, packed, reduce_range)
        return y.relu() if relu else y

    return convert


def _convolution(_: Function, x: Tensor, packed: Packed, reduce_range: bool = False) -> Tensor:
    return convolution(_rounded(x, reduce_range), packed)


TABLE: dict[str, Function] = {
    **{f"quantized::linear_dynamic{half}": _linear(False) for half in ("", "_fp16")},
    **{f"quantized::linear_relu_dynamic{half}": _linear(True) for half in ("", "_fp16")},
    **{f"quantized::conv{kind}{n}d_dynamic": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
}
