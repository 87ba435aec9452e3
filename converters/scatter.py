"""Writing by index: scatter, index_put, index_add and similar operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.indices import index_tensors, join_indices
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.scattering import REDUCTIONS, neutral, scatter_elements, scatter_slices, scattered_in
from onnxplug.converters.helpers.selection import select
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def scatter(g: GraphBuilder, node: FxNode) -> Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    x, axis, index, source = node.args
    return scatter_elements(g, x, axis, index, source)


def scatter_value(g: GraphBuilder, node: FxNode) -> Value:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    x, axis, index, value = node.args[:4]
    source = (
        g.op.Expand(operand(g, value, node.dtype), g.shape(index)) if rank_of(index) else operand(g, value, node.dtype)
    )
    reduction = REDUCTIONS[node.args[4]] if len(node.args) > 4 else "none"
    return scatter_elements(g, x, axis, index, source, reduction)


def scatter_reduce_source(g: GraphBuilder, node: FxNode) -> Value:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    x, axis, index, source, reduction = node.args
    return scatter_elements(g, x, axis, index, source, REDUCTIONS[reduction])


def scatter_add(g: GraphBuilder, node: FxNode) -> Value:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    x, axis, index, source = node.args
    return scatter_elements(g, x, axis, index, source, "add")


def scatter_reduce(g: GraphBuilder, node: FxNode) -> Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor

    Without self, the touched elements start from the reduction's neutral value.
    """
    x, axis, index, source, reduction, include_self = node.args
    return _reduce_into(g, x, axis, index, source, reduction, include_self)


def _reduce_into(
    g: GraphBuilder, x: Value, axis: int, index: Value, source: Value, reduction: str, include_self: bool
) -> Value:
    dtype = x.dtype
    assert dtype is not None
    inner = scattered_in(g, dtype, REDUCTIONS.get(reduction, "add"))
    if reduction == "mean":
        inner = computed_in(g, "Div Mul Sub Less", inner)
    x, source = g.cast(x, inner), g.cast(source, inner)
    if not include_self:
        start = g.const(neutral(reduction, inner), inner)
        start = g.op.Expand(start, g.shape(index)) if rank_of(index) else start
        x = scatter_elements(g, x, axis, index, start)
    if reduction != "mean":
        return g.cast(scatter_elements(g, x, axis, index, source, REDUCTIONS[reduction]), dtype)
    total = scatter_elements(g, x, axis, index, source, "add")
    one = g.const(1, inner)
    ones = [g.op.Expand(one, g.shape(v)) if rank_of(v) else one for v in (x, index)]
    count = ones[0]
    if not include_self:
        zero = g.const(0, inner)
        count = scatter_elements(g, count, axis, index, g.op.Expand(zero, g.shape(index)) if rank_of(index) else zero)
    count = scatter_elements(g, count, axis, index, ones[1], "add")
    if inner.is_floating_point():
        return g.cast(g.op.Div(total, count), dtype)
    # Integer division rounds down.
    quotient = g.op.Div(total, count)
    rest = g.op.Sub(total, g.op.Mul(quotient, count))
    lower = g.op.Less(rest, g.const(0, inner))
    return g.cast(g.op.Sub(quotient, g.cast(lower, inner)), dtype)


def index_reduce(g: GraphBuilder, node: FxNode) -> Value:
    """index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, *, bool include_self=True) -> Tensor

    scatter_reduce with the index repeated along the other axes.
    """
    x, axis, index, source, reduction, include_self = node.args
    axis = normalize_axis(axis, rank_of(x))
    if rank_of(x):
        column = [1] * rank_of(x)
        column[axis] = -1
        index = g.op.Expand(g.op.Reshape(index, g.const(column)), g.shape(source))
    return _reduce_into(g, x, axis, g.cast(index, INT64), source, reduction, include_self)


def put(g: GraphBuilder, node: FxNode) -> Value:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor

    By place in the flattened tensor; a negative place counts from its end.
    """
    x, index, source, accumulate = node.args
    dtype = node.dtype
    inner = scattered_in(g, dtype) if accumulate else dtype
    flat = [g.reshape(v, [-1]) for v in (g.cast(x, inner), index, g.cast(source, inner))]
    result = scatter_elements(g, flat[0], 0, flat[1], flat[2], "add" if accumulate else "none")
    return g.cast(g.op.Reshape(result, g.shape(x)), dtype)


def masked_scatter(g: GraphBuilder, node: FxNode) -> Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor

    The n-th true element of the mask takes the n-th element of the source.
    """
    x, mask, source = node.args
    shape = g.op.Shape(g.op.Or(mask, g.op.Expand(g.const(False), g.shape(x))))
    mask = g.op.Expand(mask, shape)
    places = g.op.CumSum(g.cast(g.reshape(mask, [-1]), INT64), g.const(0))
    places = g.op.Max(g.op.Sub(places, g.const(1)), g.const(0))
    # One more element, because the source may be empty where the mask is false everywhere.
    flat = g.op.Concat(g.reshape(g.cast(source, node.dtype), [-1]), g.const(np.zeros(1), node.dtype), axis=0)
    taken = g.op.Reshape(g.op.Gather(flat, places, axis=0), shape)
    return select(g, mask, taken, g.op.Expand(x, shape), node.dtype)


def index_put(g: GraphBuilder, node: FxNode) -> Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor

    A mask with one value is a Where; everything else a ScatterND with the indexed axes first.
    """
    x, indices, values, accumulate = node.args[:4]
    values = g.cast(values, node.dtype)
    present = [i for i in indices if i is not None]
    if len(present) == 1 and present[0].dtype == BOOL and not accumulate and _is_single(values):
        position = next(p for p, i in enumerate(indices) if i is not None)
        mask = present[0]
        trailing = rank_of(x) - position - rank_of(mask)
        if trailing:
            mask = unsqueeze(g, mask, *range(rank_of(mask), rank_of(mask) + trailing))
        value = g.reshape(values, []) if rank_of(values) else values
        return select(g, mask, value, x, node.dtype)
    axes, tensors = index_tensors(g, x, indices)
    if len(tensors) > 1:
        joined, index_rank = join_indices(g, tensors)
    else:
        index_rank = rank_of(tensors[0])
        joined = unsqueeze(g, tensors[0], index_rank)
    order = [*axes, *(a for a in range(rank_of(x)) if a not in axes)]
    moved = g.op.Transpose(x, perm=order)
    values = _indexed_first(g, x, axes, g.op.Slice(g.shape(joined), [0], [index_rank]), index_rank, values)
    if accumulate:
        inner = scattered_in(g, node.dtype)
        result = g.cast(scatter_slices(g, g.cast(moved, inner), joined, g.cast(values, inner)), node.dtype)
    else:
        result = g.op.ScatterND(moved, joined, values)
    return g.op.Transpose(result, perm=[order.index(a) for a in range(rank_of(x))])


def _indexed_first(
    g: GraphBuilder, x: Value, axes: Sequence[int], sizes: Value, index_rank: int, values: Value
) -> Value:
    """Values to be written, broadcast to the indices' shape followed by the axes of ``x`` that are not indexed.

    Args:
        g: The builder.
        x: The tensor written to.
        axes: Its indexed axes.
        sizes: The shape of the indices: [index_rank], int64.
        index_rank: Their rank.
        values: The values, which broadcast to the shape of ``x[indices]``.
    """
    others = [a for a in range(rank_of(x)) if a not in axes]
    adjacent = list(axes) == list(range(axes[0], axes[-1] + 1))
    # In x[indices], the new axes of adjacent indices take the place of the first index; otherwise they come first.
    before = axes[0] if adjacent and rank_of(values) > len(others) - axes[0] else 0
    shape = [
        *([g.vector([g.dim(x, a) for a in others[:before]])] if before else []),
        sizes,
        *([g.vector([g.dim(x, a) for a in others[before:]])] if others[before:] else []),
    ]
    values = g.op.Expand(values, g.op.Concat(*shape, axis=0) if len(shape) > 1 else sizes)
    if not before:
        return values
    first, last = range(before, before + index_rank), range(before + index_rank, index_rank + len(others))
    return g.op.Transpose(values, perm=[*first, *range(before), *last])


def _is_single(x: Value) -> bool:
    return x.shape is not None and all(isinstance(d, int) and d == 1 for d in x.shape)


def index_add(g: GraphBuilder, node: FxNode) -> Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    x, axis, index, source, alpha = node.args
    inner = scattered_in(g, node.dtype)
    source = g.cast(source, inner)
    if alpha != 1:
        source = compute(g, "Mul", inner, source, alpha)
    return g.cast(_by_rows(g, g.cast(x, inner), axis, index, source, add=True), node.dtype)


def index_copy(g: GraphBuilder, node: FxNode) -> Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    x, axis, index, source = node.args
    return _by_rows(g, x, axis, index, g.cast(source, node.dtype))


def index_fill(g: GraphBuilder, node: FxNode) -> Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    x, axis, index, value = node.args
    if not rank_of(x):
        rows = g.op.Expand(operand(g, value, node.dtype), g.as_vector(g.dim(index, 0) if rank_of(index) else 1))
        return _by_rows(g, x, 0, index, rows)
    axis = normalize_axis(axis, rank_of(x))
    index = index if rank_of(index) else unsqueeze(g, index, 0)
    sizes: list[Any] = list(g.dims(x))
    sizes[axis] = g.dim(index, 0)
    source = g.op.Expand(operand(g, value, node.dtype), g.vector(sizes))
    return _by_rows(g, x, axis, index, source)


def _by_rows(g: GraphBuilder, x: Value, axis: int, index: Value, source: Value, *, add: bool = False) -> Value:
    """ScatterND of whole slices along one axis."""
    if not rank_of(x):
        rows = [g.reshape(v, [-1]) for v in (x, source)]
        return g.reshape(_by_rows(g, rows[0], 0, index, rows[1], add=add), [])
    rank = rank_of(x)
    axis = normalize_axis(axis, rank)
    order = [axis, *(a for a in range(rank) if a != axis)]
    index, source = (v if rank_of(v) else unsqueeze(g, v, 0) for v in (index, source))
    moved, rows_of_source = (g.op.Transpose(v, perm=order) for v in (x, source))
    places = unsqueeze(g, g.cast(index, INT64), 1)
    result = scatter_slices(g, moved, places, rows_of_source) if add else g.op.ScatterND(moved, places, rows_of_source)
    return g.op.Transpose(result, perm=[order.index(a) for a in range(rank)])


RULES: list[Rule] = [
    Rule("aten::scatter.src", scatter),
    Rule("aten::scatter.value", scatter_value),
    Rule("aten::scatter.value_reduce", scatter_value),
    Rule("aten::scatter.reduce", scatter_reduce_source),
    Rule("aten::scatter_add.default", scatter_add),
    Rule("aten::scatter_reduce.two", scatter_reduce),
    Rule("aten::index_put.default", index_put),
    Rule("aten::_unsafe_index_put.default", index_put),
    Rule("aten::_index_put_impl.default", index_put),
    Rule("aten::index_add.default", index_add),
    Rule("aten::index_copy.default", index_copy),
    Rule("aten::index_reduce.default", index_reduce),
    Rule("aten::put.default", put),
    Rule("aten::masked_scatter.default", masked_scatter),
    Rule("aten::index_fill.int_Scalar", index_fill),
    Rule("aten::index_fill.int_Tensor", index_fill),
]
