"""Pooling of regions of interest.

``rois`` [K, 5] are rows of (batch, x1, y1, x2, y2); results are [K, C, pooled_height, pooled_width].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onnxplug import Unsupported

_HALVES = (torch.float16, torch.bfloat16)


def roi_align(g: Any, node: Any) -> Any:
    """roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor

    ``aligned`` shifts by half a pixel and lets regions be smaller than a pixel: ONNX's ``half_pixel``.
    """  # noqa: E501
    x, rois, scale, height, width, ratio, aligned = node.args
    mode = "half_pixel" if aligned else "output_half_pixel"
    return _align(g, node, x, rois, scale, height, width, ratio, coordinate_transformation_mode=mode)


def roi_align_unaligned(g: Any, node: Any) -> Any:
    """roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor

    Before opset 16 ONNX has only the form that isn't aligned.
    """  # noqa: E501
    x, rois, scale, height, width, ratio, aligned = node.args
    if aligned:
        raise Unsupported("roi_align with aligned=True needs opset 16", hint="Export with opset_version=16 or later.")
    return _align(g, node, x, rois, scale, height, width, ratio)


def _align(g: Any, node: Any, x: Any, rois: Any, scale: float, height: Any, width: Any, ratio: int, **mode: Any) -> Any:
    """RoiAlign, in float where ONNX Runtime has no kernel; a ratio of 0 or less is adaptive."""
    dtype = x.dtype
    x, rois = _wide(g, node, x), _wide(g, node, rois)
    result = g.op.RoiAlign(
        x,
        g.op.Slice(rois, [1], [5], [1]),
        _batch_of(g, rois),
        spatial_scale=float(scale),
        output_height=height,
        output_width=width,
        sampling_ratio=max(int(ratio), 0),
        mode="avg",
        **mode,
    )
    return g.cast(result, dtype)


def _wide(g: Any, node: Any, x: Any) -> Any:
    return g.cast(x, torch.float32) if node.meta(0).dtype in _HALVES else x


def _batch_of(g: Any, rois: Any) -> Any:
    return g.cast(g.op.Squeeze(g.op.Slice(rois, [0], [1], [1]), [1]), torch.int64)


def roi_pool(g: Any, node: Any) -> list[Any]:
    """roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> (Tensor, Tensor)

    MaxRoiPool rounds and splits regions as torchvision does. The second result, the places of the maxima, serves the
    backward pass alone.
    """
    x, rois, scale, height, width = node.args
    if any(user.users and user.args[1] == 1 for user in node.fx.users):
        raise Unsupported("the positions of the maxima, roi_pool's second result")
    dtype = x.dtype
    x, rois = (g.cast(v, torch.float32) for v in (x, rois))
    return [g.cast(g.op.MaxRoiPool(x, rois, pooled_shape=[height, width], spatial_scale=float(scale)), dtype), None]


def ps_roi_align(g: Any, node: Any) -> list[Any]:
    """ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio) -> (Tensor, Tensor)

    Bin (i, j) of output channel c is pooled from input channel (c height + i) width + j: aligned pooling of all
    channels, of which each keeps one bin. An adaptive grid without a point gives 0 / 0.
    """  # noqa: E501
    x, rois, scale, height, width, ratio = node.args
    pooled = _align(g, node, x, rois, scale, height, width, ratio, coordinate_transformation_mode="half_pixel")
    channels = _outputs_of(g, x, height * width)
    bins = height * width
    # [K, C, bins, bins]: the diagonal of the last two axes.
    flat = g.reshape(pooled, [g.dim(rois, 0), channels, bins * bins])
    diagonal = g.op.Gather(flat, np.arange(bins, dtype=np.int64) * (bins + 1), axis=2)
    result = g.reshape(diagonal, [g.dim(rois, 0), channels, height, width])
    if ratio <= 0:
        sides = g.op.Mul(
            g.op.Sub(g.op.Slice(rois, [3], [5], [1]), g.op.Slice(rois, [1], [3], [1])), g.const(scale, rois.dtype)
        )
        grid = g.op.Ceil(g.op.Div(sides, g.const(np.array([width, height]), rois.dtype)))
        zero = g.const(0.0, grid.dtype)
        sides_zero = g.cast(g.op.Equal(grid, zero), torch.int64)
        none = g.op.Greater(_over_last(g, "ReduceMax", sides_zero), g.const(0))
        result = g.op.Where(g.op.Unsqueeze(none, [2, 3]), g.const(float("nan"), result.dtype), result)
    return [result, _channel_mapping(g, rois, channels, height, width)]


def _over_last(g: Any, op: str, x: Any) -> Any:
    """A reduction over axis 1, which is kept, at every opset."""
    return getattr(g.op, op)(x, [1], keepdims=1) if g.opset >= 18 else getattr(g.op, op)(x, axes=[1], keepdims=1)


def _outputs_of(g: Any, x: Any, bins: int) -> int:
    (channels,) = g.concrete_shape([g.dim(x, 1)], "number of channels")
    return int(channels) // bins


def _channel_mapping(g: Any, rois: Any, channels: int, height: int, width: int) -> Any:
    """The input channel of each bin, as int32."""
    own = np.arange(channels * height * width, dtype=np.int32).reshape(1, channels, height, width)
    return g.op.Expand(g.const(own), g.vector([g.dim(rois, 0), channels, height, width]))


def ps_roi_pool(g: Any, node: Any) -> list[Any]:
    """ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> (Tensor, Tensor)

    Means of bins, bin (i, j) of output channel c from input channel (c height + i) width + j. Edges are rounded away
    from zero at the half and held below the last row and column, as in torchvision's kernel. Sums come from the
    integral image, in double: its rounding stays below a float's.
    """
    x, rois, scale, height, width = node.args
    dtype = x.dtype
    channels = _outputs_of(g, x, height * width)
    size = [g.dim(x, 2), g.dim(x, 3)]
    corners = _round(g, g.op.Mul(g.op.Slice(rois, [1], [5], [1]), g.const(scale, rois.dtype)))
    top, bottom = _edges(g, corners, 1, height, size[0])
    left, right = _edges(g, corners, 0, width, size[1])
    # [N, C_in, H + 1, W + 1], cumulated from a row and a column of zeros.
    wide = g.op.Pad(g.cast(x, torch.float64), [0, 0, 1, 1, 0, 0, 0, 0])
    total = g.op.CumSum(g.op.CumSum(wide, g.const(2)), g.const(3))
    rows, columns = (g.op.Add(g.as_scalar(s), g.const(1)) for s in size)
    flat = g.op.Reshape(total, [-1])
    own = np.arange(channels * height * width, dtype=np.int64).reshape(1, channels, height, width)
    batch = g.op.Mul(g.op.Unsqueeze(_batch_of(g, rois), [1, 2, 3]), g.const(channels * height * width))
    plane = g.op.Mul(g.op.Add(batch, g.const(own)), g.op.Mul(rows, columns))
    tall = [g.op.Add(plane, g.op.Mul(g.op.Unsqueeze(v, [1, 3]), columns)) for v in (top, bottom)]
    broad = [g.op.Unsqueeze(v, [1, 2]) for v in (left, right)]
    low, low_right, high, high_right = (g.op.Gather(flat, g.op.Add(t, b), axis=0) for t in tall for b in broad)
    summed = g.op.Sub(g.op.Sub(high_right, high), g.op.Sub(low_right, low))
    area = g.op.Mul(
        g.op.Unsqueeze(g.op.Sub(bottom, top), [1, 3]),
        g.op.Unsqueeze(g.op.Sub(right, left), [1, 2]),
    )
    mean = g.op.Div(summed, g.cast(g.op.Max(area, g.const(1)), torch.float64))
    mean = g.op.Where(g.op.Greater(area, g.const(0)), mean, g.const(0.0, torch.float64))
    return [g.cast(mean, dtype), _channel_mapping(g, rois, channels, height, width)]


def _round(g: Any, x: Any) -> Any:
    """To the nearest integer, halves away from zero; ONNX's Round takes halves to the even integer."""
    size, sign = g.op.Abs(x), g.op.Sign(x)
    whole = g.op.Floor(size)
    up = g.cast(g.op.GreaterOrEqual(g.op.Sub(size, whole), g.const(0.5, x.dtype)), x.dtype)
    return g.op.Mul(sign, g.op.Add(whole, up))


def _edges(g: Any, corners: Any, axis: int, bins: int, size: Any) -> list[Any]:
    """First and past-the-end indices [K, bins] of the bins along one axis (0: x)."""
    start = g.op.Slice(corners, [axis], [axis + 1], [1])
    end = g.op.Slice(corners, [axis + 2], [axis + 3], [1])
    side = g.op.Max(g.op.Sub(end, start), g.const(1.0, corners.dtype))
    step = g.op.Div(side, g.const(float(bins), corners.dtype))
    counted = np.arange(bins).reshape(1, bins)
    first = g.op.Floor(g.op.Mul(g.const(counted, corners.dtype), step))
    last = g.op.Ceil(g.op.Mul(g.const(counted + 1, corners.dtype), step))
    limit = g.op.Sub(g.as_scalar(size), g.const(1))
    return [g.op.Min(g.op.Max(g.cast(g.op.Add(v, start), torch.int64), g.const(0)), limit) for v in (first, last)]
