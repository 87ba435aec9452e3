"""Order along an axis: sorting, places in an order, medians."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, INT64
from onnxplug.converters.helpers.promotion import comparable
from onnxplug.converters.helpers.reductions import reduce, reduction_dtype
from onnxplug.interpret.node import FxNode


def count_below(g: GraphBuilder, edges: Value, x: Value, right: bool, dtype: ir.DataType) -> Value:
    """For each element of ``x`` how many of the ascending ``edges`` come before it; with ``right`` equal ones too.

    That number is what a binary search finds. NaN comes after every edge.

    Args:
        g: The builder.
        edges: [n], or [..., n] with the leading axes of ``x``.
        x: Any shape, [..., m] when the edges have leading axes.
        right: Whether edges equal to the element count.
        dtype: What to compare in.
    """
    edges, x = g.cast(edges, dtype), g.cast(x, dtype)
    if rank_of(edges) > 1:
        edges = unsqueeze(g, edges, rank_of(edges) - 1)
    x = unsqueeze(g, x, rank_of(x))
    after = (g.op.Greater if right else g.op.GreaterOrEqual)(edges, x)
    before = g.cast(g.op.Not(after), INT64)
    return reduce(g, "ReduceSum", before, [rank_of(before) - 1], False)


def ascending(g: GraphBuilder, x: Value, axis: int) -> tuple[Value, Value]:
    """Values and indices in ascending order, equal ones by index. No NaN may be among them."""
    size = g.as_vector(g.dim(x, axis))
    values, indices = g.op.TopK(x, size, axis=axis, largest=0, sorted=1, _outputs=2)
    return values, indices


def ordered_part(
    g: GraphBuilder, x: Value, count: Value, axis: int, largest: bool, ordered: bool = True
) -> list[Value]:
    """The first ``count`` values of an axis in order, and their indices; of equal elements the lower index goes first.

    NaN, which ONNX Runtime's TopK puts anywhere, is beyond every number, as in torch.
    """
    dtype = x.dtype
    assert dtype is not None
    inner = reduction_dtype(dtype)
    x = g.cast(x, inner)
    named: dict[str, Any] = {"axis": axis, "largest": int(largest), "sorted": int(ordered), "_outputs": 2}
    if not inner.is_floating_point():
        values, indices = g.op.TopK(x, count, **named)
        return [g.cast(values, dtype), indices]
    # The largest finite number stands for +inf, so that NaN goes beyond it.
    top = g.const(float(ml_dtypes.finfo(inner.numpy()).max), inner)
    key = g.op.Where(g.op.IsNaN(x), g.const(float("inf"), inner), g.op.Min(x, top))
    _, indices = g.op.TopK(key, count, **named)
    return [g.cast(g.op.GatherElements(x, indices, axis=axis), dtype), indices]


def sort_axis(g: GraphBuilder, x: Value, axis: int, descending: bool) -> list[Value]:
    if not rank_of(x):
        return [x, g.const(0)]
    return ordered_part(g, x, g.as_vector(g.dim(x, axis)), axis, descending)


def at_rank(g: GraphBuilder, node: FxNode, x: Value, axis: int, keepdim: bool, place: Value) -> list[Value]:
    """The element at one place of the ascending order along an axis, and its index in ``x``."""
    inner = comparable(node.dtype)
    x = g.cast(x, inner)
    key = x
    if inner.is_floating_point():
        key = g.op.Where(g.op.IsNaN(x), g.const(float("inf"), inner), x)
    _, order = ascending(g, key, axis)
    index = g.op.Gather(order, g.reshape(place, [1]), axis=axis)
    value = g.op.GatherElements(x, index, axis=axis)
    results = [g.cast(value, node.dtype), index]
    return results if keepdim else [squeeze(g, v, axis) for v in results]


def nan_rows(g: GraphBuilder, x: Value, axis: int) -> tuple[Value, Value]:
    """Whether a row holds NaN, and where its first one is; the axis kept with size 1."""
    flags = g.cast(g.op.IsNaN(x), FLOAT)
    some = g.cast(reduce(g, "ReduceMax", flags, [axis], True), BOOL)
    return some, g.op.ArgMax(flags, axis=axis, keepdims=1)


def median_of(g: GraphBuilder, x: Value, axis: int, ignore_nan: bool) -> tuple[Value, Value]:
    inner = x.dtype
    assert inner is not None
    key = x
    count: Value
    if inner.is_floating_point():
        nan = g.op.IsNaN(x)
        key = g.op.Where(nan, g.const(float("inf"), inner), x)
    if inner.is_floating_point() and ignore_nan:
        count = reduce(g, "ReduceSum", g.cast(g.op.Not(nan), INT64), [axis], True)
        # A row of NaN alone has its first element.
        count = g.op.Max(count, g.const(1))
    else:
        shape: list[Any] = list(g.dims(x))
        count = g.as_scalar(shape[axis])
        shape[axis] = 1
        count = g.op.Expand(count, g.vector(shape))
    _, order = ascending(g, key, axis)
    place = g.op.Div(g.op.Sub(count, g.const(1)), g.const(2))
    index = g.op.GatherElements(order, place, axis=axis)
    value = g.op.GatherElements(x, index, axis=axis)
    if inner.is_floating_point() and not ignore_nan:
        some, first = nan_rows(g, x, axis)
        value = g.op.Where(some, g.const(float("nan"), inner), value)
        index = g.op.Where(some, first, index)
    return value, index
