"""Reductions of runs of rows: embedding bags and segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_INT64 = ir.DataType.INT64


def _bag_of_each(g: GraphBuilder, starts: Value, count: Any) -> Value:
    """For each of ``count`` items the number of the bag that it lies in: how many bags start at or before it, less one."""
    item = unsqueeze(g, g.op.Range(g.const(0), g.as_scalar(count), g.const(1)), 1)
    begun = g.cast(g.op.LessOrEqual(unsqueeze(g, starts, 0), item), _INT64)
    result: Value = g.op.Sub(reduce(g, "ReduceSum", begun, [1], False), g.const(1))
    return result


def embedding_bag(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    return _bags(g, node, -1)


def embedding_bag_padding_idx(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """embedding_bag.padding_idx(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq, int mode, bool sparse, Tensor? per_sample_weights, bool include_last_offset, int? padding_idx) -> (Tensor, Tensor, Tensor, Tensor)

    A negative padding index counts from the end of the table; without one no row is padding.
    """  # noqa: E501
    weight, padding = node.args[0], node.args[8]
    if padding is not None and padding < 0:
        padding += g.concrete_shape(weight, "embedding table")[0]
    return _bags(g, node, -1 if padding is None else padding)


def embedding_bag_forward_only(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_embedding_bag_forward_only(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1) -> (Tensor, Tensor, Tensor, Tensor)

    Here a padding index of -1 means that no row is padding.
    """  # noqa: E501
    return _bags(g, node, node.args[8])


def _bags(g: GraphBuilder, node: FxNode, padding: int) -> list[Value | None]:
    """The sum (mode 0), mean (1) or maximum (2) of the rows in each bag; 0 for an empty bag.

    Sum and mean are products with the matrix that says which item lies in which bag. Rows that the padding index names
    are left out.
    """
    weight, indices, offsets, _, mode, _, weights, include_last = node.args[:8]
    dtype = wide(node.dtype)
    indices, offsets = g.cast(indices, _INT64), g.cast(offsets, _INT64)
    if include_last:
        offsets = g.op.Slice(offsets, np.array([0]), np.array([-1]), np.array([0]))
    count = g.dim(indices, 0)
    bag = _bag_of_each(g, offsets, count)
    bags = g.as_scalar(g.dim(offsets, 0))
    number = unsqueeze(g, g.op.Range(g.const(0), bags, g.const(1)), 1)
    inside = g.op.Equal(number, unsqueeze(g, bag, 0))
    if padding >= 0:
        inside = g.op.And(inside, unsqueeze(g, g.op.Not(g.op.Equal(indices, g.const(padding))), 0))
    rows = g.cast(g.op.Gather(weight, indices, axis=0), dtype)
    if weights is not None:
        rows = g.op.Mul(rows, unsqueeze(g, g.cast(weights, dtype), 1))
    sizes = reduce(g, "ReduceSum", g.cast(inside, _INT64), [1], False)
    if mode == 2:
        lowest = g.const(float("-inf"), dtype)
        shown = g.op.Where(unsqueeze(g, inside, 2), unsqueeze(g, rows, 0), lowest)
        best = reduce(g, "ReduceMax", shown, [1], False)
        empty = unsqueeze(g, g.op.Equal(sizes, g.const(0)), 1)
        result = g.op.Where(empty, g.const(0.0, dtype), best)
    else:
        result = g.op.MatMul(g.cast(inside, dtype), rows)
        if mode == 1:
            divisor = g.cast(g.op.Max(sizes, g.const(1)), dtype)
            result = g.op.Div(result, unsqueeze(g, divisor, 1))
    # The other three are for the backward pass; nothing of the forward one reads them.
    return [g.cast(result, node.dtype), None, None, None]


def segment_reduce(g: GraphBuilder, node: FxNode) -> Value:
    """segment_reduce(Tensor data, str reduce, *, Tensor? lengths=None, Tensor? indices=None, Tensor? offsets=None, int axis=0, bool unsafe=False, Scalar? initial=None) -> Tensor

    An empty segment is the initial value, else what the reduction starts from; NaN for a mean.
    """  # noqa: E501
    x, reduction, lengths, _, offsets, axis, _, initial = node.args
    given = lengths if lengths is not None else offsets
    if axis != 0 or given is None or rank_of(given) != 1:
        raise Unsupported("segment_reduce along another axis than the first, or of several rows of segments")
    dtype = wide(node.dtype)
    x, given = g.cast(x, dtype), g.cast(given, _INT64)
    if lengths is not None:
        ends = g.op.CumSum(given, g.const(0))
        starts = g.op.Sub(ends, given)
    else:
        starts = g.op.Slice(given, np.array([0]), np.array([-1]), np.array([0]))
        ends = g.op.Slice(given, np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0]))
    item = unsqueeze(g, g.op.Range(g.const(0), g.as_scalar(g.dim(x, 0)), g.const(1)), 0)
    inside = g.op.And(g.op.GreaterOrEqual(item, unsqueeze(g, starts, 1)), g.op.Less(item, unsqueeze(g, ends, 1)))
    for axis_ in range(2, rank_of(x) + 1):
        inside = unsqueeze(g, inside, axis_)
    op_type, neutral = {
        "sum": ("ReduceSum", 0.0),
        "mean": ("ReduceSum", 0.0),
        "prod": ("ReduceProd", 1.0),
        "max": ("ReduceMax", float("-inf")),
        "min": ("ReduceMin", float("inf")),
    }[reduction]
    start = float(initial) if initial is not None else neutral
    shown = g.op.Where(inside, unsqueeze(g, x, 0), g.const(neutral, dtype))
    result = reduce(g, op_type, shown, [1], False)
    if start != neutral:
        combine = {"ReduceSum": "Add", "ReduceProd": "Mul", "ReduceMax": "Max", "ReduceMin": "Min"}[op_type]
        result = getattr(g.op, combine)(result, g.const(start, dtype))
    if reduction == "mean":
        count = g.cast(g.op.Sub(ends, starts), dtype)
        for axis_ in range(1, rank_of(x)):
            count = unsqueeze(g, count, axis_)
        empty = g.op.Equal(count, g.const(0.0, dtype))
        whole = g.op.Div(result, count)
        fallback = g.const(start if initial is not None else float("nan"), dtype)
        result = g.op.Where(empty, fallback, whole)
    return g.cast(result, node.dtype)


RULES: list[Rule] = [
    Rule("aten::embedding_bag.default", embedding_bag),
    Rule("aten::embedding_bag.padding_idx", embedding_bag_padding_idx),
    Rule("aten::_embedding_bag_forward_only.default", embedding_bag_forward_only),
    Rule("aten::_embedding_bag.default", embedding_bag_forward_only),
    Rule("aten::segment_reduce.default", segment_reduce),
]
