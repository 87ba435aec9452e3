"""Softmax of rows whose elements are all masked."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.reductions import reduce


def zero_hidden_rows(g: GraphBuilder, scores: Value, weights: Value, axis: int) -> Value:
    """The weights, with zeros in the rows whose scores are all −inf; NaN in the scores stays."""
    dtype = scores.dtype
    assert dtype is not None
    top = reduce(g, "ReduceMax", scores, [axis], True)
    hidden = g.op.Equal(top, g.const(float("-inf"), dtype))
    return g.op.Where(hidden, g.const(0.0, dtype), weights)
