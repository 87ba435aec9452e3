"""Sampling at given places, and grids of places."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT
from onnxplug.converters.helpers.grids import iota
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.runtimes import FAR_PLACES_OVERFLOW, computed_in, has_kernel
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_PADDING = ("zeros", "border", "reflection")
#: From here on every place lies outside of an image of any size, with all the places that it is interpolated from.
_FAR = 16.0


def grid_sampler(modes: tuple[str, str, str]) -> Converter:
    """grid_sampler: by ONNX's GridSample, whose modes have other names since opset 20."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, grid, mode, padding, corners = node.args
        if rank_of(x) == 5 and mode == 2:
            raise Unsupported("cubic interpolation of a volume: torch itself refuses it")
        if rank_of(x) == 5 and g.opset < 20:
            raise Decline("GridSample takes volumes since opset 20")
        dtype = node.dtype
        inner = computed_in(g, "GridSample", dtype)
        if not has_kernel(g, "GridSample", inner):
            raise Decline("no kernel for doubles: the decomposition keeps their precision")
        grid = g.cast(grid, inner)
        if _PADDING[padding] != "reflection" and FAR_PLACES_OVERFLOW.concerns(g):
            grid = g.op.Clip(grid, g.const(-_FAR, inner), g.const(_FAR, inner))
        result = g.op.GridSample(
            g.cast(x, inner),
            grid,
            mode=modes[mode],
            padding_mode=_PADDING[padding],
            align_corners=int(corners),
        )
        return g.cast(result, dtype)

    convert.__name__ = convert.__qualname__ = "grid_sampler"
    return convert


def affine_grid(g: GraphBuilder, node: FxNode) -> Value:
    """affine_grid_generator(Tensor theta, SymInt[] size, bool align_corners) -> Tensor

    AffineGrid has the place -1 on an axis of one element whose corners are aligned; PyTorch has 0.
    """
    theta, sizes, corners = node.args
    spatial = sizes[2:]
    same = not corners or all(isinstance(size, int) and size != 1 for size in spatial)
    if g.opset >= 20 and node.dtype in (FLOAT, DOUBLE) and same:
        return g.op.AffineGrid(theta, g.vector(list(sizes)), align_corners=int(corners))
    dtype, rank = wide(node.dtype), len(spatial)
    theta = unsqueeze(g, g.cast(theta, dtype), *range(1, rank))
    columns = [g.op.Gather(theta, g.const(axis), axis=rank + 1) for axis in range(rank + 1)]
    result = unsqueeze(g, columns[rank], rank)
    for axis, size in enumerate(reversed(spatial)):  # x, the first coordinate, is the last axis
        places = unsqueeze(g, _places(g, size, corners, dtype), *range(1, axis + 2))
        result = g.op.Add(result, g.op.Mul(unsqueeze(g, columns[axis], rank), places))
    return g.cast(result, node.dtype)


def _places(g: GraphBuilder, size: Size, corners: bool, dtype: ir.DataType) -> Value:
    """The coordinates of an axis' elements: their centres between -1 and 1, or from -1 to 1."""
    count = g.as_scalar(size)
    last = g.op.Sub(count, g.const(1))
    middle = g.op.Sub(g.op.Mul(iota(g, size), g.const(2)), last)
    length = g.op.Max(last, g.const(1)) if corners else count
    return g.op.Div(g.cast(middle, dtype), g.cast(length, dtype))


_EARLY, _LATE = grid_sampler(("bilinear", "nearest", "bicubic")), grid_sampler(("linear", "nearest", "cubic"))
RULES: list[Rule] = [
    Rule("aten::grid_sampler_2d.default", _EARLY, opset=(16, 19)),
    Rule("aten::grid_sampler_2d.default", _LATE, opset=(20, None)),
    Rule("aten::grid_sampler_3d.default", _LATE, opset=(20, None)),
    Rule("aten::grid_sampler.default", _EARLY, opset=(16, 19)),
    Rule("aten::grid_sampler.default", _LATE, opset=(20, None)),
    Rule("aten::affine_grid_generator.default", affine_grid),
]
