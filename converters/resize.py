"""Interpolation and the rearrangement of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import FLOAT, INT64
from onnxplug.converters.helpers.interpolation import Axis, axes_of, by_weights, is_plain_nearest, nearest_places
from onnxplug.converters.helpers.runtimes import RESIZE_ROUNDS_OTHERWISE, computed_in, has_kernel
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def nearest(g: GraphBuilder, node: FxNode) -> Value:
    """upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor"""
    return _nearest(g, node, False, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


def nearest_exact(g: GraphBuilder, node: FxNode) -> Value:
    """_upsample_nearest_exact2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor"""
    return _nearest(g, node, True, coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil")


def _nearest(g: GraphBuilder, node: FxNode, exact: bool, **named: Any) -> Value:
    """Resize where every formula finds the same neighbours.

    Otherwise the neighbours that torch's float32 arithmetic finds are gathered.
    """
    x = node.args[0]
    axes = axes_of(g, node)
    if has_kernel(g, "Resize", x.dtype) and all(is_plain_nearest(axis) for axis in axes):
        factors = [float(a.ratio) if a.ratio is not None else a.factor for a in axes]
        return g.op.Resize(x, None, _factors(g, factors), mode="nearest", **named)
    snaps = not exact and len(axes) == 2
    for number, axis in enumerate(axes):
        if axis.ratio != 1 or not (snaps or axis.factor in (None, 1.0)):
            x = g.op.Gather(x, nearest_places(g, axis, exact, snaps), axis=2 + number)
    return x


def _factors(g: GraphBuilder, factors: Sequence[float | None]) -> Value:
    return g.const(np.array([1.0, 1.0, *factors]), FLOAT)


def smooth(mode: str) -> Converter:
    """Linear and cubic interpolation."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        named: dict[str, Any] = {"cubic_coeff_a": -0.75} if mode == "cubic" else {}
        return _smooth(g, node, mode, False, **named)

    convert.__name__ = convert.__qualname__ = mode
    return convert


def antialiased(mode: str) -> Converter:
    """Linear, cubic and Lanczos interpolation that widens the filter when it makes an image smaller."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        # torch's antialiased cubic takes a = -0.5, as Pillow's.
        named: dict[str, Any] = {"cubic_coeff_a": -0.5} if mode == "cubic" else {}
        return _smooth(g, node, mode, True, antialias=1, exclude_outside=1, **named)

    convert.__name__ = convert.__qualname__ = f"antialiased_{mode}"
    return convert


def _smooth(g: GraphBuilder, node: FxNode, mode: str, widen: bool, **named: Any) -> Value:
    """Resize where its coordinates are torch's, otherwise a product with weights for each axis."""
    x = node.args[0]
    corners = node.kwargs["align_corners"]
    axes = axes_of(g, node)
    plain = has_kernel(g, "Resize", x.dtype)
    if mode == "lanczos" or x.dtype.is_integer():
        plain = False  # ONNX's Resize has no such mode, and does not define how bytes are rounded
    elif widen:
        apart = RESIZE_ROUNDS_OTHERWISE.concerns(g) and all(axis.is_static for axis in axes)
        plain = plain and not apart and not corners and g.opset >= 18
    by_sizes = corners or all(_maps_by_sizes(a) for a in axes)
    if not plain or not (by_sizes or all(_maps_by_factor(a) for a in axes)):
        return by_weights(g, x, axes, node.dtype, corners=corners, mode=mode, widen=widen)
    named["coordinate_transformation_mode"] = "align_corners" if corners else "half_pixel"
    if by_sizes:
        target = g.vector([g.dim(x, 0), g.dim(x, 1), *(a.out for a in axes)])
        return g.op.Resize(x, None, None, target, mode=mode, **named)
    factors = [a.factor if a.factor is not None else float(a.ratio or 1) for a in axes]
    return g.op.Resize(x, None, _factors(g, factors), mode=mode, **named)


def _maps_by_sizes(axis: Axis) -> bool:
    """Whether the ratio of the sizes is the factor."""
    return axis.factor is None or (axis.ratio is not None and axis.factor == axis.ratio)


def _maps_by_factor(axis: Axis) -> bool:
    """Whether the size follows from a factor, also where that is rounded to a float."""
    if axis.factor is None:
        return axis.ratio is not None
    # A factor between 1 and 1.5 leaves some sizes as they are; torch copies tensors of these sizes.
    return axis.follows and float(np.float32(axis.factor)) == axis.factor and not 1.0 < axis.factor < 1.5


def pixel_shuffle(g: GraphBuilder, node: FxNode) -> Value:
    """pixel_shuffle(Tensor self, int upscale_factor) -> Tensor

    [*, C r², H, W] to [*, C, H r, W r]; ONNX's operator takes four axes.
    """
    x, factor = node.args
    if rank_of(x) == 4 and has_kernel(g, "DepthToSpace", node.dtype):
        return g.op.DepthToSpace(x, blocksize=factor, mode="CRD")
    *batch, channels, height, width = g.dims(x)
    blocks = g.reshape(x, [*batch, _divided(g, channels, factor**2), factor, factor, height, width])
    n = len(batch)
    moved = g.op.Transpose(blocks, perm=[*range(n + 1), n + 3, n + 1, n + 4, n + 2])
    sizes = (_times(g, size, factor) for size in (height, width))
    return g.reshape(moved, [*batch, _divided(g, channels, factor**2), *sizes])


def pixel_unshuffle(g: GraphBuilder, node: FxNode) -> Value:
    """pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor

    [*, C, H r, W r] to [*, C r², H, W]. Not SpaceToDepth, which puts the block before the channel.
    """
    x, factor = node.args
    *batch, channels, high, wide = g.dims(x)
    height, width = (_divided(g, size, factor) for size in (high, wide))
    rows = g.reshape(x, [*batch, channels, height, factor, width, factor])
    n = len(batch)
    moved = g.op.Transpose(rows, perm=[*range(n + 1), n + 2, n + 4, n + 1, n + 3])
    return g.reshape(moved, [*batch, _times(g, channels, factor**2), height, width])


def _divided(g: GraphBuilder, size: Size, by: int) -> Size:
    return size // by if isinstance(size, int) else g.op.Div(size, g.const(by))


def _times(g: GraphBuilder, size: Size, by: int) -> Size:
    return size * by if isinstance(size, int) else g.op.Mul(size, g.const(by))


def channel_shuffle(g: GraphBuilder, node: FxNode) -> Value:
    """channel_shuffle(Tensor self, SymInt groups) -> Tensor"""
    x, groups = node.args
    batch, channels, *rest = g.dims(x)
    each = channels // groups if isinstance(channels, int) else g.op.Div(channels, g.as_scalar(groups))
    rows = g.op.Reshape(x, g.vector([batch, groups, each, *rest]))
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    return g.op.Reshape(g.op.Transpose(rows, perm=order), g.vector([batch, channels, *rest]))


def native_channel_shuffle(g: GraphBuilder, node: FxNode) -> Value:
    """native_channel_shuffle(Tensor self, SymInt groups) -> Tensor"""
    return channel_shuffle(g, node)


def im2col(g: GraphBuilder, node: FxNode) -> Value:
    """im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor

    [N, C, H, W], or without N, to [N, C kh kw, windows]: a Gather along each axis finds the elements of all windows.
    """
    x, kernel, dilation, padding, stride = node.args
    images = unsqueeze(g, x, 0) if rank_of(x) == 3 else x
    axes = zip(g.dims(images)[2:], kernel, dilation, padding, stride, strict=True)
    rows, columns = (_window_places(g, *axis) for axis in axes)
    if any(padding):
        inner = computed_in(g, "Pad", node.dtype)
        pads = g.const([0, 0, *padding, 0, 0, *padding], INT64)
        images = g.cast(g.op.Pad(g.cast(images, inner), pads, g.const(0, inner)), node.dtype)
    windows = g.op.Gather(g.op.Gather(images, rows, axis=2), columns, axis=4)
    windows = g.op.Transpose(windows, perm=[0, 1, 2, 4, 3, 5])
    (result,) = node.outputs
    assert result is not None
    return g.op.Reshape(windows, g.vector(result.shape))


def _window_places(g: GraphBuilder, size: Size, kernel: int, dilation: int, padding: int, stride: int) -> Value:
    """Where the elements of the windows are on a padded axis, [kernel, windows]."""
    offsets = np.arange(kernel)[:, None] * dilation
    span = dilation * (kernel - 1) + 1 - 2 * padding
    if isinstance(size, int):
        return g.const(offsets + np.arange((size - span) // stride + 1) * stride, INT64)
    last = g.op.Div(g.op.Sub(size, g.const(span)), g.const(stride))
    starts = g.op.Range(g.const(0), g.op.Add(last, g.const(1)), g.const(1))
    return g.op.Add(g.const(offsets, INT64), g.op.Mul(starts, g.const(stride)))


def col2im(g: GraphBuilder, node: FxNode) -> Value:
    """col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor

    Overlapping elements are summed.
    """
    x, size, kernel, dilation, padding, stride = node.args
    single = rank_of(x) == 2
    inner = computed_in(g, "Col2Im", node.dtype)
    columns = g.cast(unsqueeze(g, x, 0) if single else x, inner)
    pads = list(padding)
    result = g.op.Col2Im(
        columns,
        g.vector(size),
        g.const(list(kernel), INT64),
        dilations=list(dilation),
        pads=[*pads, *pads],
        strides=list(stride),
    )
    result.shape = ir.Shape([None] * 4)
    return g.cast(squeeze(g, result, 0) if single else result, node.dtype)


def _forms(name: str, convert: Converter) -> list[Rule]:
    return [Rule(f"aten::{name}.vec", convert), Rule(f"aten::{name}.default", convert)]


RULES: list[Rule] = [
    *[rule for n in (1, 2, 3) for rule in _forms(f"upsample_nearest{n}d", nearest)],
    *[rule for n in (1, 2, 3) for rule in _forms(f"_upsample_nearest_exact{n}d", nearest_exact)],
    *_forms("upsample_linear1d", smooth("linear")),
    *_forms("upsample_bilinear2d", smooth("linear")),
    *_forms("upsample_trilinear3d", smooth("linear")),
    *_forms("upsample_bicubic2d", smooth("cubic")),
    *_forms("_upsample_bilinear2d_aa", antialiased("linear")),
    *_forms("_upsample_bicubic2d_aa", antialiased("cubic")),
    *_forms("_upsample_lanczos2d_aa", antialiased("lanczos")),
    Rule("aten::channel_shuffle.default", channel_shuffle),
    Rule("aten::native_channel_shuffle.default", native_channel_shuffle),
    Rule("aten::im2col.default", im2col),
    Rule("aten::col2im.default", col2im, opset=(18, None)),
    Rule("aten::pixel_shuffle.default", pixel_shuffle),
    Rule("aten::pixel_unshuffle.default", pixel_unshuffle),
]
