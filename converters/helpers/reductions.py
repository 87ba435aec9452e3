"""Reductions over axes: the ONNX node at every opset, sums in a dtype that has them, variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axes, rank_of, squeeze
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.promotion import operand, wide
from onnxplug.converters.helpers.runtimes import (
    INTEGERS_THROUGH_DOUBLE,
    LONG_SUMS_LOSE_DIGITS,
    LOW_HALVES_ARE_SIGNED,
    computed_in,
)
from onnxplug.converters.helpers.scans import running_product
from onnxplug.interpret.node import FxNode

#: Opset from which a reduction takes its axes as an input, not as an attribute.
_AXES_ARE_INPUT = {"ReduceSum": 13}
_AXES_ARE_INPUT_DEFAULT = 18

#: The most elements that are summed by one node where a runtime adds them one after another, and the most of one axis among more.
_LONG, _ROW = 1 << 18, 1 << 10


def reduce(g: GraphBuilder, op_type: str, x: Value, axes: Sequence[int] | None, keepdims: bool) -> Value:
    """A reduction over non-negative static axes (``None``: all), given as an attribute or an input, as the opset defines.

    A 0-dim tensor has no axes. Its reduction is the identity, unless the operator changes a single element
    (ReduceSumSquare, ReduceL1 …), which ONNX expresses by an absent axes input. Long sums and means of floats are taken in steps.
    """
    rank = rank_of(x)
    if op_type in ("ReduceSum", "ReduceMean") and is_long(g, x, axes):
        return long_sum(g, op_type, x, list(range(rank)) if axes is None else list(axes), keepdims)
    every = axes is None or len(axes) == rank
    emit: Any = getattr(g.op, op_type)
    keep = int(keepdims)
    if every:
        result: Value = emit(x, keepdims=keep)
    elif g.opset >= _AXES_ARE_INPUT.get(op_type, _AXES_ARE_INPUT_DEFAULT):
        result = emit(x, g.vector(axes or ()), keepdims=keep)
    else:
        result = emit(x, axes=list(axes or ()), keepdims=keep)
    return result


def is_long(g: GraphBuilder, x: Value, axes: Sequence[int] | None) -> bool:
    """Whether a sum over axes (``None``: all) is one of :func:`is_long_sum`."""
    return is_long_sum(g, x.dtype, [(x.shape or ())[axis] for axis in (range(rank_of(x)) if axes is None else axes)])


def is_long_sum(g: GraphBuilder, dtype: ir.DataType | None, sizes: Sequence[Any]) -> bool:
    """Whether a sum over axes of some sizes has so many floats that the runtime's own would lose digits.

    Dynamic axes count as one element, and as many with ``exact=True``.
    """
    if dtype != FLOAT or not LONG_SUMS_LOSE_DIGITS.concerns(g):
        return False
    static = [size for size in sizes if isinstance(size, int)]
    return math.prod(static) > _LONG or (g.exact and len(static) < len(sizes) and 0 not in static)


def long_sum(g: GraphBuilder, op_type: str, x: Value, axes: Sequence[int], keepdims: bool) -> Value:
    """A sum or mean of floats in steps, along one axis after another; in double with ``exact=True`` where an axis is dynamic."""
    count = count_of(g, x, axes, FLOAT)
    if g.exact and any(not isinstance(g.dims(x)[axis], int) for axis in axes):
        total = g.cast(reduce(g, "ReduceSum", g.cast(x, DOUBLE), axes, keepdims), FLOAT)
        return g.op.Div(total, count) if op_type == "ReduceMean" else total
    for axis in sorted(axes, reverse=True):
        size = g.dims(x)[axis]
        if isinstance(size, int) and size > _ROW:
            x = reduce(g, "ReduceSum", in_rows(g, x, axis, size), [axis + 1], False)
        x = reduce(g, "ReduceSum", x, [axis], keepdims)
    return g.op.Div(x, count) if op_type == "ReduceMean" else x


def in_rows(g: GraphBuilder, x: Value, axis: int, size: int) -> Value:
    """A long axis as two of about the square root of its size; zeros fill the last row."""
    row = math.isqrt(size)
    row = next((width for width in range(row, row // 2, -1) if size % width == 0), row)
    count = -(-size // row)
    if count * row > size:
        ends = [0] * rank_of(x)
        ends[axis] = count * row - size
        x = g.op.Pad(x, g.vector([0] * rank_of(x) + ends))
    sizes = g.dims(x)
    return g.reshape(x, [*sizes[:axis], count, row, *sizes[axis + 1 :]])


def reduced(
    g: GraphBuilder,
    op_type: str,
    x: Value,
    axes: Sequence[int] | int | None,
    keepdim: bool,
    dtype: ir.DataType,
    exact: bool = False,
) -> Value:
    """A reduction of axes as torch names them; half types are computed in float, in which torch accumulates them.

    Args:
        g: The builder.
        op_type: ONNX's reduction.
        x: Any shape.
        axes: Axes as torch names them; ``None`` for all.
        keepdim: Whether the axes stay, with size 1.
        dtype: Of the result.
        exact: NaN of ReduceMax and ReduceMin, whose result ONNX leaves open, stays; sums and products to 64-bit integers
            wrap around, also where a runtime's kernels go through double.

    Sums and products to narrower integers wrap up to 2**53, and beyond it with the export's ``exact=True``.
    """
    rank = rank_of(x)
    if dtype == BOOL:
        x = g.cast(x, BOOL)  # before they are counted: 0.5 is true, and 1 - 1 too
    elif op_type in ("ReduceSum", "ReduceProd") and is_narrow(dtype) and INTEGERS_THROUGH_DOUBLE.concerns(g):
        # The kernels for narrow integers saturate, and so does a sum of doubles: ONNX Runtime joins the two Casts after it.
        x = g.cast(g.cast(x, dtype), INT64)
        return g.cast(reduced(g, op_type, x, axes, keepdim, INT64, exact=g.exact), dtype)
    inner = computed_in(g, op_type, wide(dtype))
    through_double = exact and inner == INT64 and INTEGERS_THROUGH_DOUBLE.concerns(g)
    over = normalize_axes(axes, rank) if rank else None
    if through_double and op_type == "ReduceSum" and (x.dtype == BOOL or is_narrow(x.dtype)):
        # No sum of 32-bit integers reaches 2**53, and ReduceSum of doubles is 10 times as fast as that of integers.
        return g.cast(reduce(g, op_type, g.cast(x, DOUBLE), over, keepdim), dtype)
    x = g.cast(x, inner)
    if op_type == "ReduceMean" and rank and any((x.shape or ())[a] == 0 for a in over or []):
        # The mean of no elements is NaN; ONNX does not define it.
        sums = reduce(g, "ReduceSum", x, over, keepdim)
        return g.cast(g.op.Div(sums, g.const(0.0, inner)), dtype)
    if through_double and rank and op_type in ("ReduceSum", "ReduceProd"):
        return g.cast(_by_running_totals(g, op_type, x, over or [], keepdim), dtype)
    if op_type in _AT and inner == INT64 and rank and LOW_HALVES_ARE_SIGNED.concerns(g):
        return g.cast(_element_at(g, _AT[op_type], x, over, keepdim), dtype)
    result = reduce(g, op_type, x, over, keepdim)
    if exact and op_type in ("ReduceMax", "ReduceMin") and inner.is_floating_point() and rank:
        result = g.op.Where(some_nan(g, x, over, keepdim), g.const(float("nan"), inner), result)
    return g.cast(result, dtype)


#: The operator that finds the element that a reduction gives.
_AT = {"ReduceMax": "ArgMax", "ReduceMin": "ArgMin"}


def _element_at(g: GraphBuilder, finder: str, x: Value, axes: Sequence[int] | None, keepdim: bool) -> Value:
    """The element at ``finder`` along axes (``None``: all), one axis after another."""
    rank = rank_of(x)
    if axes is None or len(axes) == rank:
        x, shape, axes = g.reshape(x, [-1]), [1] * rank if keepdim else [], [0]
    else:
        shape = None
    for axis in axes:
        x = g.op.GatherElements(x, getattr(g.op, finder)(x, axis=axis, keepdims=1), axis=axis)
    if shape is not None:
        return g.reshape(x, shape)
    return x if keepdim or not axes else squeeze(g, x, *axes)


def is_narrow(dtype: ir.DataType | None) -> bool:
    """Whether elements are integers of at most 32 bits."""
    return dtype is not None and dtype.is_integer() and dtype.bitwidth <= 32


def _by_running_totals(g: GraphBuilder, op_type: str, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """A sum or product of 64-bit integers that wraps as torch's: the last element of the cumulative sum or product."""
    if op_type == "ReduceSum" and len(axes) == rank_of(x) > 1 and not keepdim:
        x, axes = g.reshape(x, [-1]), [0]
    for axis in sorted(axes, reverse=True):
        size = (x.shape or ())[axis]
        start = 0 if op_type == "ReduceSum" else 1
        if not isinstance(size, int) or size == 0:
            # One more element in front, because an empty axis has no last element.
            edge = g.op.Gather(g.op.Shape(x), g.const([a for a in range(rank_of(x)) if a != axis], INT64), axis=0)
            before = g.op.Slice(edge, g.const([0]), g.const([axis]))
            after = g.op.Slice(edge, g.const([axis]), g.const([rank_of(x)]))
            first = g.op.Expand(g.const(start), g.op.Concat(before, g.const([1]), after, axis=0))
            x = g.op.Concat(first, x, axis=axis)
        if op_type == "ReduceSum":
            running = g.op.CumSum(x, g.const(axis))
        else:
            running = running_product(g, x, axis)
        x = g.op.Gather(running, g.const([-1], INT64) if keepdim else g.const(-1), axis=axis)
    return x


def some_nan(g: GraphBuilder, x: Value, axes: Sequence[int] | None, keepdim: bool) -> Value:
    return g.cast(reduce(g, "ReduceMax", g.cast(g.op.IsNaN(x), FLOAT), axes, keepdim), BOOL)


def log_of_sum(g: GraphBuilder, x: Value, axes: Sequence[int] | None, keepdim: bool) -> Value:
    """The logarithm of the sum of exponentials over non-negative axes (``None``: all).

    The maximum is subtracted where it is finite, so that a row of −inf gives −inf and not NaN.
    """
    dtype = x.dtype
    top = reduce(g, "ReduceMax", x, axes, True)
    shift = g.op.Where(g.op.IsInf(top), g.const(0.0, dtype), top)
    total = reduce(g, "ReduceSum", g.op.Exp(g.op.Sub(x, shift)), axes, True)
    result = g.op.Add(g.op.Log(total), shift)
    return result if keepdim or not axes else squeeze(g, result, *axes)


def count_of(g: GraphBuilder, x: Value, axes: Sequence[int], dtype: ir.DataType) -> Value:
    """How many elements the axes hold, as a number of the dtype."""
    total: Any = 1
    for axis in axes:
        size = g.dim(x, axis)
        total = total * size if isinstance(total, int) and isinstance(size, int) else g.op.Mul(total, size)
    return operand(g, total, dtype)


def variance_of(
    g: GraphBuilder, x: Value, axes: Any, correction: float | Value, keepdim: bool, dtype: ir.DataType
) -> tuple[Value, Value]:
    """Variance and mean. The divisor is max(0, n - correction); a divisor of 0 gives NaN, as in torch."""
    rank = rank_of(x)
    inner = wide(dtype)
    x = g.cast(x, inner)
    over = normalize_axes(axes, rank)
    mean = reduced(g, "ReduceMean", x, over, True, inner) if rank else x
    deviation = g.op.Sub(x, mean)
    squares = reduce(g, "ReduceSum", g.op.Mul(deviation, deviation), over if rank else None, keepdim)
    left = g.op.Sub(count_of(g, x, over if rank else [], inner), operand(g, correction, inner))
    variance = g.op.Div(squares, g.op.Max(left, g.const(0.0, inner)))
    if not keepdim and over and rank:
        mean = squeeze(g, mean, *over)
    return g.cast(variance, dtype), g.cast(mean, dtype)


def variance_arguments(node: FxNode) -> tuple[Any, float | Value, bool]:
    """Axes, correction and keepdim of every overload of var, std, var_mean, std_mean."""
    named = node.kwargs
    if "correction" in named:
        correction = named["correction"]
        return named.get("dim"), 1.0 if correction is None else correction, named.get("keepdim", False)
    return named.get("dim"), 1.0 if named.get("unbiased", True) else 0.0, named.get("keepdim", False)
