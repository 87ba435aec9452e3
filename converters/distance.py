"""Distances between points."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters._axes import rank_of, reduce, unsqueeze
from onnxplug.converters._promote import operands
from onnxplug.converters.exponential import wide
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def norm_of_difference(g: GraphBuilder, difference: Value, p: float, axis: int) -> Value:
    """The p-norm along an axis: the number of differing elements for p = 0, the largest for p = inf."""
    dtype = difference.dtype
    assert dtype is not None
    size = g.op.Abs(difference)
    if p == 0:
        return reduce(g, "ReduceSum", g.cast(g.op.Greater(size, g.const(0.0, dtype)), dtype), [axis], False)
    if p == 1:
        return reduce(g, "ReduceSum", size, [axis], False)
    if p == float("inf"):
        return reduce(g, "ReduceMax", size, [axis], False)
    if p == 2:
        result: Value = g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(size, size), [axis], False))
        return result
    total = reduce(g, "ReduceSum", g.op.Pow(size, g.const(float(p), dtype)), [axis], False)
    result = g.op.Pow(total, g.const(1.0 / p, dtype))
    return result


def cdist(g: GraphBuilder, node: FxNode) -> Value:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor

    Every difference is formed: what the product form |x|² + |y|² - 2xy of large inputs loses is kept.
    """
    x, y, p = node.args[:3]
    dtype = wide(node.dtype)
    a, b = operands(g, x, y, dtype=dtype)
    if b.shape is not None and isinstance(b.shape[-1], int) and b.shape[-1] == 0:
        shape: list[Any] = [d if isinstance(d, int) else g.symbol(d) for d in node.shape]
        result: Value = g.op.Expand(g.const(0.0, node.dtype), g.vector(shape))
        return result
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
