"""Norms of differences."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.reductions import reduce


def norm_of_difference(g: GraphBuilder, difference: Value, p: float, axis: int) -> Value:
    """The p-norm along an axis: the number of differing elements for p = 0, the largest for p = inf; 0 of no elements."""
    dtype = difference.dtype
    assert dtype is not None
    size = g.op.Abs(difference)
    if p == 0:
        # 0 or 1, and NaN of NaN.
        return reduce(g, "ReduceSum", g.op.Min(g.op.Ceil(size), g.const(1.0, dtype)), [axis], False)
    if p == 1:
        return reduce(g, "ReduceSum", size, [axis], False)
    if p == float("inf"):
        largest = reduce(g, "ReduceMax", size, [axis], False)
        count = g.dim(difference, axis)
        return largest if isinstance(count, int) and count else g.op.Max(largest, g.const(0.0, dtype))
    if p == 2:
        return g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(size, size), [axis], False))
    total = reduce(g, "ReduceSum", g.op.Pow(size, g.const(float(p), dtype)), [axis], False)
    result = g.op.Pow(total, g.const(1.0 / p, dtype))
    return result
