"""Deformable convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def deform_conv2d(g: Any, node: Any) -> Any:
    """deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor

    Offsets [N, 2 G kh kw, H', W'], y before x; ONNX's DeformConv has torchvision's layouts and its zero outside.
    """  # noqa: E501
    x, weight, offset, mask, bias, sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask = node.args
    dtype = x.dtype
    tensors = [x, weight, offset, bias, mask if use_mask else None]
    if node.meta(0).dtype in (torch.float16, torch.bfloat16):
        tensors = [v if v is None else g.cast(v, torch.float32) for v in tensors]
    result = g.op.DeformConv(
        *tensors,
        kernel_shape=g.concrete_shape([g.dim(weight, 2), g.dim(weight, 3)], "kernel"),
        strides=[sh, sw],
        pads=[ph, pw, ph, pw],
        dilations=[dh, dw],
        group=groups,
        offset_group=offset_groups,
    )
    return g.cast(result, dtype)


def deform_conv2d_by_gathers(g: Any, node: Any) -> Any:
    """deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor

    Before opset 19: the four neighbours of each sampled point are gathered and weighted, and a 1 × 1 convolution sums
    channels and kernel positions.
    """  # noqa: E501
    x, weight, offset, mask, bias, sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask = node.args
    dtype = x.dtype
    if node.meta(0).dtype in (torch.float16, torch.bfloat16):
        x, weight, offset, mask, bias = (g.cast(v, torch.float32) for v in (x, weight, offset, mask, bias))
    filters, per_group, kh, kw = g.concrete_shape(weight, "weight")
    taps = kh * kw
    batch, (high, wide) = g.dim(x, 0), (g.dim(offset, 2), g.dim(offset, 3))
    each = per_group * groups // offset_groups
    moved = g.op.Reshape(offset, g.vector([batch, offset_groups, taps, 2, high, wide]))
    rows, columns = np.divmod(np.arange(taps), kw)
    y = _sampled(g, moved, 0, high, sh, ph, rows * dh)
    z = _sampled(g, moved, 1, wide, sw, pw, columns * dw)
    pixels = g.op.Reshape(x, g.vector([batch, offset_groups, each, -1]))
    sampled = _interpolated(g, g.op.Transpose(pixels, perm=[0, 1, 3, 2]), y, z, g.dim(x, 2), g.dim(x, 3))
    if use_mask:
        weights = g.op.Reshape(mask, g.vector([batch, offset_groups, taps, high, wide]))
        sampled = g.op.Mul(sampled, g.op.Unsqueeze(weights, [5]))
    spread = g.op.Transpose(sampled, perm=[0, 1, 5, 2, 3, 4])
    spread = g.op.Reshape(spread, g.vector([batch, per_group * groups * taps, high, wide]))
    kernel = g.op.Reshape(weight, [filters, per_group * taps, 1, 1])
    return g.cast(g.op.Conv(spread, kernel, bias, kernel_shape=[1, 1], group=groups), dtype)


def _sampled(g: Any, moved: Any, which: int, count: Any, stride: int, pad: int, taps: np.ndarray) -> Any:
    """Sampled coordinates [N, G, taps, H', W'] along one axis (0: y)."""
    own = g.op.Squeeze(g.op.Slice(moved, [which], [which + 1], [3]), [3])
    places = g.op.Range(g.const(0), g.as_scalar(count), g.const(1))
    places = g.op.Sub(g.op.Mul(places, g.const(stride)), g.const(pad))
    places = g.op.Unsqueeze(places, [1] if which == 0 else [0])
    grid = g.op.Add(places, g.const(taps.astype(np.int64).reshape(-1, 1, 1)))
    return g.op.Add(g.cast(grid, own.dtype), own)


def _interpolated(g: Any, pixels: Any, y: Any, x: Any, high: Any, wide: Any) -> Any:
    """Bilinear values [N, G, taps, H', W', C] of ``pixels`` [N, G, H W, C]; outside the image there is zero."""
    dtype = y.dtype
    low = [g.op.Floor(v) for v in (y, x)]
    weight = [g.op.Sub(v, f) for v, f in zip((y, x), low, strict=True)]
    corner = [g.cast(v, torch.int64) for v in low]
    zero, one = g.const(0), g.const(1)
    limits = [g.op.Sub(g.as_scalar(v), one) for v in (high, wide)]
    near = g.op.And(*(g.op.Greater(v, g.const(-1.0, dtype)) for v in (y, x)))
    total: Any = None
    for down in (0, 1):
        for right in (0, 1):
            place = [g.op.Add(c, one) if step else c for c, step in zip(corner, (down, right), strict=True)]
            inside = near
            for p, limit in zip(place, limits, strict=True):
                inside = g.op.And(inside, g.op.And(g.op.GreaterOrEqual(p, zero), g.op.LessOrEqual(p, limit)))
            clamped = [g.op.Min(g.op.Max(p, zero), limit) for p, limit in zip(place, limits, strict=True)]
            index = g.op.Unsqueeze(g.op.Add(g.op.Mul(clamped[0], g.as_scalar(wide)), clamped[1]), [5])
            value = g.op.GatherND(pixels, index, batch_dims=2)
            share = [
                w if step else g.op.Sub(g.const(1.0, dtype), w) for w, step in zip(weight, (down, right), strict=True)
            ]
            part = g.op.Mul(value, g.op.Unsqueeze(g.op.Mul(*share), [5]))
            part = g.op.Where(g.op.Unsqueeze(inside, [5]), part, g.const(0.0, dtype))
            total = part if total is None else g.op.Add(total, part)
    return total
