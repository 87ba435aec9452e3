"""Interpolation and the rearrangement of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def _resize(
    g: GraphBuilder, x: Value, size: Sequence[Any] | None, scales: Sequence[float] | None, **named: Any
) -> Value:
    """Resize by factors where torch maps coordinates by them, else to sizes."""
    dtype = x.dtype
    if dtype is not None and dtype.is_integer() and named["mode"] != "nearest":
        # torch rounds bytes, ONNX Runtime cuts them off.
        smooth = _resize(g, g.cast(x, ir.DataType.FLOAT), size, scales, **named)
        return g.cast(g.op.Clip(g.op.Round(smooth), g.const(0.0), g.const(255.0)), dtype)
    if scales is not None and all(s is not None for s in scales):
        factors = g.const(np.array([1.0, 1.0, *scales]), ir.DataType.FLOAT)
        result: Value = g.op.Resize(x, None, factors, **named)
        return result
    if size is None:
        raise Unsupported("interpolation with neither a size nor factors")
    target = g.vector([g.dim(x, 0), g.dim(x, 1), *size])
    result = g.op.Resize(x, None, None, target, **named)
    return result


def _arguments(node: FxNode) -> tuple[Any, list[float] | None]:
    """Output size and factors of either form of an upsampling operator."""
    named = node.kwargs
    if "scale_factors" in named:
        return named["output_size"], named["scale_factors"]
    given = [v for k, v in named.items() if k.startswith("scales")]
    return named["output_size"], given if given and all(s is not None for s in given) else None


def _by_places(g: GraphBuilder, x: Value, node: FxNode, scales: Any, shift: float) -> Value:
    """Nearest neighbours gathered an axis at a time, places worked out in double: at floor((i + shift) * step)."""
    for number, out in enumerate(node.shape[2:]):
        size = (x.shape or ())[2 + number]
        assert isinstance(size, int) and isinstance(out, int)
        step = 1.0 / scales[number] if scales else size / out
        places = np.minimum(np.floor((np.arange(out) + shift) * step).astype(np.int64), size - 1)
        x = g.op.Gather(x, g.const(places), axis=2 + number)
    return x


def nearest(g: GraphBuilder, node: FxNode) -> Value:
    """upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor"""
    size, scales = _arguments(node)
    if node.dtype == ir.DataType.DOUBLE and _is_static(node.args[0], node):
        return _by_places(g, node.args[0], node, scales, 0.0)
    return _resize(
        g,
        node.args[0],
        size,
        scales,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def nearest_exact(g: GraphBuilder, node: FxNode) -> Value:
    """_upsample_nearest_exact2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor"""
    size, scales = _arguments(node)
    if node.dtype == ir.DataType.DOUBLE and _is_static(node.args[0], node):
        return _by_places(g, node.args[0], node, scales, 0.5)
    return _resize(
        g,
        node.args[0],
        size,
        scales,
        mode="nearest",
        coordinate_transformation_mode="half_pixel",
        nearest_mode="round_prefer_ceil",
    )


def smooth(mode: str) -> Converter:
    """Linear and cubic interpolation."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        size, scales = _arguments(node)
        corners = node.kwargs["align_corners"]
        x = node.args[0]
        if x.dtype == ir.DataType.DOUBLE and _is_static(x, node):
            # ONNX Runtime's Resize places its points in float.
            return _by_weights(g, x, node, scales, corners, mode, widen=False)
        named: dict[str, Any] = {"cubic_coeff_a": -0.75} if mode == "cubic" else {}
        if corners and scales is not None:
            # With aligned corners factors only settle the size.
            size, scales = node.shape[2:], None
            if not all(isinstance(s, int) for s in size):
                raise Unsupported("interpolation by factors of dynamic sizes with align_corners=True")
        transformation = "align_corners" if corners else "half_pixel"
        return _resize(g, x, size, scales, mode=mode, coordinate_transformation_mode=transformation, **named)

    convert.__name__ = convert.__qualname__ = mode
    return convert


def _is_static(x: Value, node: FxNode) -> bool:
    return all(isinstance(s, int) for s in (*list(x.shape or ())[2:], *node.shape[2:]))


def _by_weights(
    g: GraphBuilder, x: Value, node: FxNode, scales: Any, corners: bool, mode: str, *, widen: bool
) -> Value:
    """Separable interpolation as a product with a matrix of weights for each axis."""
    inner = x.dtype if x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else ir.DataType.FLOAT
    result = g.cast(x, inner)
    rank = rank_of(x)
    for number, out in enumerate(node.shape[2:]):
        axis = 2 + number
        size = (x.shape or ())[axis]
        assert isinstance(size, int) and isinstance(out, int)
        weights = _weights(size, out, scales[number] if scales else None, corners, mode, widen)
        order = [a for a in range(rank) if a != axis] + [axis]
        product = g.op.MatMul(g.op.Transpose(result, perm=order), g.const(weights.T, inner))
        result = g.op.Transpose(product, perm=[order.index(a) for a in range(rank)])
    if node.dtype.is_integer():
        result = g.op.Clip(g.op.Round(result), g.const(0.0, inner), g.const(255.0, inner))
    return g.cast(result, node.dtype)


def _weights(size: int, out: int, factor: float | None, corners: bool, mode: str, widen: bool) -> np.ndarray:
    """What each element of one axis contributes to each one of the result: [out, size].

    Where torch places its points: ATen/native/UpSample.h, area_pixel_compute_scale and _source_index; with ``widen`` the
    antialiasing filter grows with the step between points, as Pillow's.
    """
    if corners:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1.0 / factor if factor else size / out
    places = np.arange(size)
    weights = np.zeros((out, size))
    for i in range(out):
        if widen:
            stretch = max(step, 1.0)
            center = step * (i + 0.5)
            reach = (1.0 if mode == "linear" else 2.0) * stretch
            first, last = max(int(center - reach + 0.5), 0), min(int(center + reach + 0.5), size)
            row = _filter((places[first:last] - center + 0.5) / stretch, mode, -0.5)
            weights[i, first:last] = row / row.sum()
            continue
        source = step * i if corners else step * (i + 0.5) - 0.5
        if mode == "linear":
            source = max(source, 0.0)
        low = int(np.floor(source))
        for j in range(low - 1, low + 3):
            weight = float(_filter(np.array(source - j), mode, -0.75))
            weights[i, min(max(j, 0), size - 1)] += weight
    return weights


def _filter(x: np.ndarray, mode: str, a: float) -> np.ndarray:
    """The triangle, or Keys' cubic convolution with coefficient ``a`` (1981)."""
    x = np.abs(x)
    if mode == "linear":
        return np.maximum(1.0 - x, 0.0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def antialiased(mode: str) -> Converter:
    """Linear and cubic interpolation that widens the filter when it makes an image smaller."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        size, scales = _arguments(node)
        corners = node.kwargs["align_corners"]
        x = node.args[0]
        if _is_static(x, node):
            return _by_weights(g, x, node, scales, corners, mode, widen=True)
        if g.opset < 18:
            raise Unsupported("antialiased interpolation of dynamic sizes needs opset 18 or later")
        if corners or scales is None:
            size, scales = node.shape[2:] if size is None else size, None
        # torch's antialiased cubic takes a = -0.5, as Pillow's.
        named: dict[str, Any] = {"cubic_coeff_a": -0.5} if mode == "cubic" else {}
        named["coordinate_transformation_mode"] = "align_corners" if corners else "half_pixel"
        return _resize(g, x, size, scales, mode=mode, antialias=1, exclude_outside=1, **named)

    convert.__name__ = convert.__qualname__ = f"antialiased_{mode}"
    return convert


def pixel_shuffle(g: GraphBuilder, node: FxNode) -> Value:
    """pixel_shuffle(Tensor self, int upscale_factor) -> Tensor"""
    x, factor = node.args
    if rank_of(x) != 4:
        raise Unsupported("pixel_shuffle of a tensor whose rank is not 4")
    result: Value = g.op.DepthToSpace(x, blocksize=factor, mode="CRD")
    return result


def pixel_unshuffle(g: GraphBuilder, node: FxNode) -> Value:
    """pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor

    Not SpaceToDepth, which puts the block before the channel.
    """
    x, factor = node.args
    if rank_of(x) != 4:
        raise Unsupported("pixel_unshuffle of a tensor whose rank is not 4")
    batch, channels = g.dim(x, 0), g.dim(x, 1)
    height, width = (s // factor if isinstance(s, int) else g.op.Div(s, g.const(factor)) for s in g.dims(x)[2:])
    rows = g.reshape(x, [batch, channels, height, factor, width, factor])
    moved = g.op.Transpose(rows, perm=[0, 1, 3, 5, 2, 4])
    many = channels * factor**2 if isinstance(channels, int) else g.op.Mul(channels, g.const(factor**2))
    return g.reshape(moved, [batch, many, height, width])


def channel_shuffle(g: GraphBuilder, node: FxNode) -> Value:
    """channel_shuffle(Tensor self, SymInt groups) -> Tensor"""
    x, groups = node.args
    batch, channels, *rest = g.dims(x)
    each = channels // groups if isinstance(channels, int) else g.op.Div(channels, g.as_scalar(groups))
    rows = g.op.Reshape(x, g.vector([batch, groups, each, *rest]))
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    result: Value = g.op.Reshape(g.op.Transpose(rows, perm=order), g.vector([batch, channels, *rest]))
    return result


def col2im(g: GraphBuilder, node: FxNode) -> Value:
    """col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor

    What overlaps is added.
    """
    x, size, kernel, dilation, padding, stride = node.args
    single = rank_of(x) == 2
    inner = ir.DataType.DOUBLE if node.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    columns = g.cast(unsqueeze(g, x, 0) if single else x, inner)
    pads = list(padding)
    result = g.op.Col2Im(
        columns,
        g.vector(size),
        g.const(list(kernel), ir.DataType.INT64),
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
    Rule("aten::channel_shuffle.default", channel_shuffle),
    Rule("aten::col2im.default", col2im, opset=(18, None)),
    Rule("aten::pixel_shuffle.default", pixel_shuffle),
    Rule("aten::pixel_unshuffle.default", pixel_unshuffle),
]
