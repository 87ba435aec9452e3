"""Operators of quantised tensors with packed weights: linear, convolution and embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxplug.errors import CaptureError
from onnxplug_quantized.tensor import QTensor
from onnxplug_quantized.weights import Packed, Table

Function = Callable[..., Any]
#: Number of dimensions to the function.
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def linear(x: Tensor, packed: Packed) -> Tensor:
    """``x @ weight.T + bias`` on numbers."""
    return F.linear(x, packed.numbers, packed.bias)


def convolution(x: Tensor, packed: Packed) -> Tensor:
    """A convolution or transposed convolution of 1, 2 or 3 dimensions on numbers."""
    geometry, dims = dict(packed.geometry), x.dim() - 2
    if dims < len(geometry["stride"]):  # of one dimension, packed with two, and not by a layer
        return convolution(x.unsqueeze(2), packed).squeeze(2)
    if geometry.pop("transpose"):
        return _TRANSPOSED[dims](x, packed.numbers, packed.bias, **geometry)
    del geometry["output_padding"]
    return _CONVOLUTIONS[dims](x, packed.numbers, packed.bias, **geometry)


def _weighted(compute: Function, after: Function | None = None) -> Function:
    """Row of an operator ``(x, packed, …, scale, zero_point)``."""

    def convert(_: Function, x: QTensor, packed: Packed, *args: Any) -> QTensor:
        y = compute(x.restored(reduced=packed.heeds_range), packed)
        scale, zero_point = args[-2:]
        return QTensor.of(y if after is None else after(y), scale, zero_point, x.dtype)

    return convert


def _convolution_add(relu: bool) -> Function:
    def convert(_: Function, x: QTensor, other: QTensor, packed: Packed, scale: Any, zero_point: Any) -> QTensor:
        y = convolution(x.restored(reduced=packed.heeds_range), packed) + other.numbers
        return QTensor.of(y.relu() if relu else y, scale, zero_point, x.dtype)

    return convert


def _linear_leaky_relu(_: Function, x: QTensor, packed: Packed, scale: Any, zero_point: Any, slope: float) -> QTensor:
    return QTensor.of(
        F.leaky_relu(linear(x.restored(reduced=packed.heeds_range), packed), slope), scale, zero_point, x.dtype
    )


def _embedding(_: Function, weight: Table, indices: Tensor, pruned_weights: bool = False) -> Tensor:
    return weight.rows(indices)


def _embedding_bag(
    _: Function,
    weight: Table,
    indices: Tensor,
    offsets: Tensor | None = None,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    pruned_weights: bool = False,
    per_sample_weights: Tensor | None = None,
    compressed_indices_mapping: Tensor | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """``embedding_bag``, whose kernel computes sums whatever ``mode`` is."""
    if compressed_indices_mapping is not None:
        raise CaptureError("a quantised embedding bag with pruned weights")
    if indices.dim() == 2 and offsets is not None:
        raise CaptureError("a quantised embedding bag with offsets beside indices of two dimensions")
    options: dict[str, Any] = {"mode": "sum", "per_sample_weights": per_sample_weights}
    if indices.dim() == 2:  # the kernel takes the rows' own starts for offsets
        bags = F.embedding_bag(indices, weight.rows(), **options)
        return bags[:-1] if include_last_offset else bags
    return F.embedding_bag(indices, weight.rows(), offsets, include_last_offset=include_last_offset, **options)


def _linear_prepack(_: Function, weight: Any, bias: Tensor | None = None) -> Packed:
    return Packed(weight, bias)


def _convolution_prepack(transposed: bool) -> Function:
    def convert(_: Function, weight: Any, bias: Tensor | None, stride: Any, padding: Any, *others: Any) -> Packed:
        output_padding, dilation, groups = others if transposed else ([0] * len(stride), *others)
        geometry = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        return Packed(weight, bias, **geometry, groups=groups, transpose=transposed)

    return convert


_DIMS = (1, 2, 3)
TABLE: dict[str, Function] = {
    "quantized::linear": _weighted(linear),
    "quantized::linear_relu": _weighted(linear, torch.relu),
    "quantized::linear_tanh": _weighted(linear, torch.tanh),
    "quantized::linear_leaky_relu": _linear_leaky_relu,
    "quantized::linear_unpack": lambda _, packed: packed.unpack(),
    "quantized::linear_prepack": _linear_prepack,
    **{f"quantized::conv{n}d": _weighted(convolution) for n in _DIMS},
    **{f"quantized::conv{n}d_relu": _weighted(convolution, torch.relu) for n in _DIMS},
    **{f"quantized::conv_transpose{n}d": _weighted(convolution) for n in _DIMS},
    "quantized::conv2d_add": _convolution_add(False),
    "quantized::conv2d_add_relu": _convolution_add(True),
    **{f"quantized::conv{n}d_prepack": _convolution_prepack(False) for n in (2, 3)},
    **{f"quantized::conv_transpose{n}d_prepack": _convolution_prepack(True) for n in (2, 3)},
    **{f"quantized::conv{kind}{n}d_unpack": lambda _, p: p.unpack() for kind in ("", "_transpose") for n in _DIMS},
    **{f"quantized::embedding_{kind}": _embedding for kind in ("byte", "4bit")},
    **{f"quantized::embedding_bag_{kind}": _embedding_bag for kind in ("byte", "4bit")},
}
