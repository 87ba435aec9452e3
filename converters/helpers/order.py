"""Order along an axis: sorting, places in an order, medians."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, FLOAT16, INT32, INT64
from onnxplug.converters.helpers.loops import repeat
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.interpret.node import FxNode


def count_below(g: GraphBuilder, edges: Value, x: Value, right: bool, dtype: ir.DataType) -> Value:
    """For each element of ``x`` the number of ascending ``edges`` before it; with ``right`` also those equal to it.

    That number is the result of a binary search. NaN comes after every edge.

    Args:
        g: The builder.
        edges: [n], or [..., n] with the leading axes of ``x``.
        x: Any shape, [..., m] when the edges have leading axes.
        right: Whether edges equal to the element count.
        dtype: The dtype of the comparison.
    """
    edges, x = g.cast(edges, dtype), g.cast(x, dtype)
    if rank_of(edges) > 1:
        edges = unsqueeze(g, edges, rank_of(edges) - 1)
    x = unsqueeze(g, x, rank_of(x))
    after = (g.op.Greater if right else g.op.GreaterOrEqual)(edges, x)
    before = g.cast(g.op.Not(after), INT64)
    return reduce(g, "ReduceSum", before, [rank_of(before) - 1], False)


def without_nan(g: GraphBuilder, edges: Value) -> Value:
    """Ascending edges with NaN at their end, with numbers in its place so that :func:`count_below` finds torch's places.

    torch's bisection goes to the right of NaN: an element beyond the last number that it compares with comes after every edge.
    On its way to the right it compares with the edges ``n - (n + 1) // 2**k``. Each edge after the last of these that is a
    number becomes that number; without one every edge becomes the last edge, NaN.

    Args:
        g: The builder.
        edges: [..., n], floats.
    """
    op, axis = g.op, rank_of(edges) - 1
    size = g.as_scalar(g.dim(edges, axis))
    compared = op.Sub(size, op.Div(op.Add(size, g.const(1)), g.const(2 ** np.arange(1, 63))))
    numbers = reduce(g, "ReduceSum", g.cast(op.Not(op.IsNaN(edges)), INT64), [axis], True)
    last = reduce(g, "ReduceMax", op.Where(op.Less(compared, numbers), compared, g.const(-1)), [axis], True)
    return op.GatherElements(edges, op.Min(op.Range(g.const(0), size, g.const(1)), last), axis=axis)


def first_beyond(g: GraphBuilder, edges: Value, x: Value) -> Value:
    """The place of the first of the ascending ``edges`` that is greater than each element of ``x``, by bisection.

    Memory is that of ``x`` alone, however many edges there are.

    Args:
        g: The builder.
        edges: [..., n] with n of at least 1; the last edge is greater than every element.
        x: [..., m] of the same dtype and leading axes.
    """
    axis = rank_of(edges) - 1
    zeros = g.op.Expand(g.const(0), g.shape(x))
    last = g.op.Add(zeros, g.op.Sub(g.as_scalar(g.dim(edges, axis)), g.const(1)))

    def step(_: Value, low: Value, high: Value) -> list[Value]:
        middle = g.op.Div(g.op.Add(low, high), g.const(2))
        beyond = g.op.Greater(g.op.GatherElements(edges, middle, axis=axis), x)
        low = g.op.Where(beyond, low, g.op.Min(g.op.Add(middle, g.const(1)), high))
        return [low, g.op.Where(beyond, middle, high)]

    size = g.cast(g.as_scalar(g.dim(edges, axis)), DOUBLE)
    steps = g.op.Add(g.cast(g.op.Ceil(g.op.Div(g.op.Log(size), g.const(math.log(2), DOUBLE))), INT64), g.const(1))
    return repeat(g, steps, step, zeros, last)[1]


def order_key(g: GraphBuilder, x: Value) -> Value:
    """Numbers of the same order as ``x`` for TopK: NaN is the largest, beyond +inf, which is beyond every finite number.

    ONNX leaves it open where TopK puts NaN; in ONNX Runtime it lands anywhere. A float type of wider range has room for the
    three: float16 is compared as float, float and bfloat16 (whose range is float's) as double. ``x`` is narrower than
    double, or an integer, which is its own key.
    """
    dtype = x.dtype
    assert dtype is not None and dtype != DOUBLE
    if not dtype.is_floating_point():
        return g.cast(x, computed_in(g, "TopK", dtype))
    inner, infinity, nan = (FLOAT, 1e38, 3e38) if dtype == FLOAT16 else (DOUBLE, 1e300, 1e308)
    bounded = g.op.Clip(g.cast(x, inner), g.const(-infinity, inner), g.const(infinity, inner))
    return g.op.Where(g.op.IsNaN(x), g.const(nan, inner), bounded)


def order(g: GraphBuilder, x: Value, count: Value, axis: int, largest: bool, ordered: bool = True) -> Value:
    """The indices of the first ``count`` elements of an axis in order; equal elements keep index order.

    NaN is the largest value.

    Args:
        g: The builder.
        x: Any shape, at least one axis.
        count: [1], int64.
        axis: Axis of ``x``.
        largest: Descending order.
        ordered: Whether the first elements must be in order among themselves.
    """
    named: dict[str, Any] = {"axis": axis, "largest": int(largest), "_outputs": 2}
    if x.dtype != DOUBLE:
        _, indices = g.op.TopK(order_key(g, x), count, sorted=int(ordered), **named)
        return indices
    # No type is wider: NaN counts as +inf at first, and goes to its end by a second, stable sort.
    nan = g.op.IsNaN(x)
    everything = g.as_vector(g.dim(x, axis))
    _, places = g.op.TopK(g.op.Where(nan, g.const(float("inf"), DOUBLE), x), everything, sorted=1, **named)
    flags = g.op.GatherElements(g.cast(nan, INT32), places, axis=axis)
    _, chosen = g.op.TopK(flags, count, sorted=1, **named)
    return g.op.GatherElements(places, chosen, axis=axis)


def ordered_part(
    g: GraphBuilder, x: Value, count: Value, axis: int, largest: bool, ordered: bool = True
) -> list[Value]:
    """The first ``count`` values of an axis in order, and their indices; see :func:`order`."""
    indices = order(g, x, count, axis, largest, ordered)
    return [g.op.GatherElements(x, indices, axis=axis), indices]


def sort_axis(g: GraphBuilder, x: Value, axis: int, descending: bool) -> list[Value]:
    if not rank_of(x):
        return [x, g.const(0)]
    return ordered_part(g, x, g.as_vector(g.dim(x, axis)), axis, descending)


def at_rank(g: GraphBuilder, node: FxNode, x: Value, axis: int, keepdim: bool, place: Value) -> list[Value]:
    """The element at one place of the ascending order along an axis, and its index in ``x``."""
    indices = order(g, x, g.as_vector(g.dim(x, axis)), axis, largest=False)
    index = g.op.Gather(indices, g.reshape(place, [1]), axis=axis)
    results = [g.op.GatherElements(x, index, axis=axis), index]
    return results if keepdim else [squeeze(g, v, axis) for v in results]


def nan_rows(g: GraphBuilder, x: Value, axis: int) -> tuple[Value, Value]:
    """Whether a row holds NaN, and the place of its first NaN; the axis kept with size 1."""
    flags = g.cast(g.op.IsNaN(x), FLOAT)
    some = g.cast(reduce(g, "ReduceMax", flags, [axis], True), BOOL)
    return some, g.op.ArgMax(flags, axis=axis, keepdims=1)


def median_of(g: GraphBuilder, x: Value, axis: int, ignore_nan: bool) -> tuple[Value, Value]:
    """The lower of the two middle elements of an axis and its index, the axis kept with size 1.

    A row with NaN gives its first NaN, or with ``ignore_nan`` the median of the others, if there are any.
    """
    inner = x.dtype
    assert inner is not None
    size = g.dim(x, axis)
    count: Value
    if inner.is_floating_point() and ignore_nan:
        numbers = g.cast(g.op.Not(g.op.IsNaN(x)), INT64)
        count = g.op.Max(reduce(g, "ReduceSum", numbers, [axis], True), g.const(1))
    else:
        shape: list[Any] = list(g.dims(x))
        shape[axis] = 1
        count = g.op.Expand(g.as_scalar(size), g.vector(shape))
    place = g.op.Div(g.op.Sub(count, g.const(1)), g.const(2))
    index = g.op.GatherElements(order(g, x, g.as_vector(size), axis, largest=False), place, axis=axis)
    value = g.op.GatherElements(x, index, axis=axis)
    if inner.is_floating_point() and not ignore_nan:
        some, first = nan_rows(g, x, axis)
        value = g.op.Where(some, g.const(float("nan"), inner), value)
        index = g.op.Where(some, first, index)
    return value, index
