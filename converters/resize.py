"""Interpolation and the rearrangement of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters._axes import rank_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def _resize(
    g: GraphBuilder, x: Value, size: Sequence[Any] | None, scales: Sequence[float] | None, **named: Any
) -> Value:
    """Resize by factors where torch maps coordinates by them, else to sizes."""
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


def nearest(g: GraphBuilder, node: FxNode) -> Value:
    """upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor"""
    size, scales = _arguments(node)
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
        named: dict[str, Any] = {"cubic_coeff_a": -0.75} if mode == "cubic" else {}
        if corners and scales is not None:
            # With aligned corners factors only settle the size.
            size, scales = node.shape[2:], None
            if not all(isinstance(s, int) for s in size):
                raise Unsupported("interpolation by factors of dynamic sizes with align_corners=True")
        transformation = "align_corners" if corners else "half_pixel"
        return _resize(g, node.args[0], size, scales, mode=mode, coordinate_transformation_mode=transformation, **named)

    convert.__name__ = convert.__qualname__ = mode
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
    channels, height, width = g.concrete_shape(list(x.shape or ())[1:], "shape")
    rows = g.reshape(x, [g.dim(x, 0), channels, height // factor, factor, width // factor, factor])
    moved = g.op.Transpose(rows, perm=[0, 1, 3, 5, 2, 4])
    return g.reshape(moved, [g.dim(x, 0), channels * factor * factor, height // factor, width // factor])


def _forms(name: str, convert: Converter) -> list[Rule]:
    return [Rule(f"aten::{name}.vec", convert), Rule(f"aten::{name}.default", convert)]


RULES: list[Rule] = [
    *[rule for n in (1, 2, 3) for rule in _forms(f"upsample_nearest{n}d", nearest)],
    *[rule for n in (1, 2, 3) for rule in _forms(f"_upsample_nearest_exact{n}d", nearest_exact)],
    *_forms("upsample_linear1d", smooth("linear")),
    *_forms("upsample_bilinear2d", smooth("linear")),
    *_forms("upsample_trilinear3d", smooth("linear")),
    *_forms("upsample_bicubic2d", smooth("cubic")),
    Rule("aten::pixel_shuffle.default", pixel_shuffle),
    Rule("aten::pixel_unshuffle.default", pixel_unshuffle),
]
