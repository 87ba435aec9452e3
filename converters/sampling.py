"""Sampling at given places: grids."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of
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


_EARLY, _LATE = grid_sampler(("bilinear", "nearest", "bicubic")), grid_sampler(("linear", "nearest", "cubic"))
RULES: list[Rule] = [
    Rule("aten::grid_sampler_2d.default", _EARLY, opset=(16, 19)),
    Rule("aten::grid_sampler_2d.default", _LATE, opset=(20, None)),
    Rule("aten::grid_sampler_3d.default", _LATE, opset=(20, None)),
    Rule("aten::grid_sampler.default", _EARLY, opset=(16, 19)),
    Rule("aten::grid_sampler.default", _LATE, opset=(20, None)),
]
