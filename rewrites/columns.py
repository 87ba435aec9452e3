"""Columns of a product that nobody reads are not computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import int_attribute, made_by, reads, used_once
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

#: A product of fewer columns costs too little: finding the columns that are read would cost more.
_FEWEST = 64
#: A value without some entries of one axis: the value, the axis, the cut itself.
_Cut = Callable[[ir.Value, int], ir.Value]


def gathered_columns(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``GatherElements(MatMul(a, b), index)`` along the columns: a product from the least index to the greatest.

    DeBERTa multiplies by the vectors of all relative positions, 512 or more, and then reads as many as a sequence has:
    twice its length. The least and the greatest index are computed once for all products that are read at the same
    places. The operands of ``b`` are cut instead of ``b``, so that no more of it is computed either.
    """
    data, index = node.inputs
    product, shape = made_by(data, "MatMul"), dims_of(data)
    if product is None or data is None or index is None or shape is None or not used_once(data):
        return None
    axis, columns = int_attribute(node, "axis", 0) % len(shape), shape[-1]
    a, b = product.inputs
    rows = dims_of(b)
    if axis != len(shape) - 1 or not isinstance(columns, int) or columns < _FEWEST or index.dtype != ir.DataType.INT64:
        return None
    # ONNX Runtime lays one matrix of weights out for its products when it loads them: a part of it costs more.
    if a is None or b is None or rows is None or len(rows) < 3 or len(dims_of(a) or ()) < 2:
        return None
    expand = made_by(index, "Expand")
    places = expand.inputs[0] if expand is not None else index
    assert places is not None
    low, high = g.op.ReduceMin(places, keepdims=0), g.op.ReduceMax(places, keepdims=0)
    # A negative index counts from the last column: then all columns stay.
    negative = g.op.Less(low, g.const(0))
    first, end = g.op.Where(negative, g.const(0), low), g.op.Where(negative, g.const(columns - 1), high)
    start, stop = (g.op.Reshape(v, g.const([1])) for v in (first, g.op.Add(end, g.const(1))))
    fewer = _without(g, b, len(rows) - 1, lambda x, at: g.op.Slice(x, start, stop, g.const([at])))
    moved = g.op.Sub(places, first)
    if expand is not None:
        moved = g.op.Expand(moved, expand.inputs[1])
    result: ir.Value = g.op.GatherElements(g.op.MatMul(a, fewer), moved, axis=axis)
    return result


def _without(g: GraphBuilder, x: ir.Value, axis: int, cut: _Cut) -> ir.Value:
    """``cut`` of a value along an axis, moved up through transpositions, repetitions and scales."""
    node = made_by(x, "Transpose", "Tile", "Expand", "Mul", "Div")
    if node is None or not used_once(x):
        return cut(x, axis)
    source, *others = node.inputs
    assert source is not None
    whole, shape = dims_of(x), dims_of(source)
    if node.op_type == "Transpose" and "perm" in node.attributes:
        perm = node.attributes["perm"].as_ints()
        result: ir.Value = g.op.Transpose(_without(g, source, perm[axis], cut), perm=perm)
        return result
    if whole is None or shape is None or len(shape) != len(whole) or shape[axis] != whole[axis]:
        return cut(x, axis)
    if node.op_type == "Tile" or (node.op_type != "Expand" and all(dims_of(v) == () for v in others)):
        result = getattr(g.op, node.op_type)(_without(g, source, axis, cut), *others)
        return result
    return cut(x, axis)


REWRITES = [Rewrite("gathered_columns", "GatherElements", gathered_columns, when=reads("MatMul"))]
