"""Distances between points."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.distances import norm_of_difference
from onnxplug.converters.helpers.promotion import operands, wide
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def cdist(g: GraphBuilder, node: FxNode) -> Value:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor

    Computed from the differences; the form |x|² + |y|² - 2xy loses precision for large inputs.
    """
    x, y, p = node.args[:3]
    dtype = wide(node.dtype)
    a, b = operands(g, x, y, dtype=dtype)
    if b.shape is not None and isinstance(b.shape[-1], int) and b.shape[-1] == 0:
        shape: list[Any] = [g.size(d) for d in node.shape]
        return g.op.Expand(g.const(0.0, node.dtype), g.vector(shape))
    rank = rank_of(a)
    difference = g.op.Sub(unsqueeze(g, a, rank - 1), unsqueeze(g, b, rank_of(b) - 2))
    return g.cast(norm_of_difference(g, difference, p, rank_of(difference) - 1), node.dtype)


def pdist(g: GraphBuilder, node: FxNode) -> Value:
    """_pdist_forward(Tensor self, float p=2.) -> Tensor

    The distances above the diagonal, row by row.
    """
    x, p = node.args
    dtype = wide(node.dtype)
    x = g.cast(x, dtype)
    count = g.as_scalar(g.dim(x, 0))
    steps = g.op.Range(g.const(0), count, g.const(1))
    above = g.op.Less(unsqueeze(g, steps, 1), unsqueeze(g, steps, 0))
    places = g.op.NonZero(above)
    rows = [g.op.Gather(x, g.op.Gather(places, g.const(i), axis=0), axis=0) for i in (0, 1)]
    return g.cast(norm_of_difference(g, g.op.Sub(rows[0], rows[1]), p, 1), node.dtype)


RULES: list[Rule] = [
    Rule("aten::_cdist_forward.default", cdist),
    Rule("aten::_pdist_forward.default", pdist),
    Rule("aten::pdist.default", pdist),
]
