"""LDL factorisations of symmetric indefinite matrices, and solutions by them, as LAPACK's sytrf and sytrs compute them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, INT32, INT64
from onnxplug.converters.helpers.grids import batch_of, common_batch, full, iota, offset
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import dtype_of, rearranged, take, transpose, triangle
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

#: The bound of Bunch and Kaufman, 1977, on how much smaller than its column a pivot may be.
_ALPHA = (1 + math.sqrt(17)) / 8


def linalg_ldl_factor_ex(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_ldl_factor_ex(Tensor self, *, bool hermitian=False, bool check_errors=False) -> (Tensor LD, Tensor pivots, Tensor info)

    Of the lower triangle, [*batch, n, n]. The pivots count from 1; two negative ones stand for a block of 2 × 2.
    """  # noqa: E501
    a = node.args[0]
    strict = triangle(g, a, upper=False, strict=True)
    whole = g.op.Add(triangle(g, a, upper=False), transpose(g, strict))
    batch, n = batch_of(g, a), g.dim(a, -1)
    pivots, info = full(g, 0, INT64, [*batch, n]), full(g, 0, INT64, [*batch, 1])
    inside = full(g, False, BOOL, [*batch, 1])
    rows = iota(g, n)
    packed, pivots, info, _ = repeat(g, n, lambda k, *states: _step(g, rows, k, *states), whole, pivots, info, inside)
    info = g.op.Squeeze(info, g.const([rank_of(info) - 1]))
    return [triangle(g, packed, upper=False), g.cast(pivots, INT32), g.cast(info, INT32)]


def _step(
    g: GraphBuilder, rows: Value, k: Value, a: Value, pivots: Value, info: Value, inside: Value
) -> Sequence[Value]:
    """One column, unless it is the second one of a block (``inside``, [*batch, 1])."""
    dtype = dtype_of(a)
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    rank = rank_of(a)
    at = as_index(g, k)
    pivot, pair, failed = _pivot(g, rows, k, a)
    pair = g.op.And(pair, g.op.Not(inside))
    target = g.op.Add(k, g.cast(pair, INT64))
    order = g.op.Where(g.op.Equal(rows, target), pivot, g.op.Where(g.op.Equal(rows, pivot), target, rows))
    order = g.op.Where(inside, rows, order)
    later = g.op.GreaterOrEqual(rows, k)
    trailing = g.op.And(unsqueeze(g, later, 1), later)
    a = g.op.Where(trailing, rearranged(g, rearranged(g, a, order, -2), order, -1), a)
    following = g.op.Min(g.op.Add(at, g.const(1)), g.op.Sub(as_index(g, g.as_scalar(g.dim(a, -1))), g.const(1)))
    first, second = take(g, a, at, -1), take(g, a, following, -1)
    d11, d21, d22 = take(g, first, at, -2), take(g, first, following, -2), take(g, second, following, -2)
    wide_pair, idle = unsqueeze(g, pair, rank - 1), unsqueeze(g, g.op.Or(inside, failed), rank - 1)
    rest = unsqueeze(g, g.op.Greater(rows, k), 1)
    beyond = unsqueeze(g, g.op.Greater(rows, g.op.Add(k, g.const(1))), 1)
    # A single pivot.
    x = g.op.Where(rest, first, zero)
    single = g.op.Div(x, g.op.Where(g.op.Equal(d11, zero), one, d11))
    # A block of two.
    d = g.op.Where(g.op.Equal(d21, zero), one, d21)
    upper, lower = g.op.Div(d22, d), g.op.Div(d11, d)
    scale = g.op.Div(g.op.Div(one, g.op.Sub(g.op.Mul(upper, lower), one)), d)
    p, q = g.op.Where(beyond, first, zero), g.op.Where(beyond, second, zero)
    left = g.op.Mul(scale, g.op.Sub(g.op.Mul(upper, p), q))
    right = g.op.Mul(scale, g.op.Sub(g.op.Mul(lower, q), p))
    by_pair = g.op.Add(g.op.Mul(p, transpose(g, left)), g.op.Mul(q, transpose(g, right)))
    change = g.op.Where(wide_pair, by_pair, g.op.Mul(single, transpose(g, x)))
    column, next_column = g.op.Equal(rows, k), g.op.Equal(rows, g.op.Add(k, g.const(1)))
    updated = g.op.Sub(a, change)
    factor = g.op.Where(wide_pair, left, single)
    place = g.op.And(g.op.And(column, rest), g.op.Or(g.op.Not(wide_pair), beyond))
    updated = g.op.Where(place, factor, updated)
    updated = g.op.Where(g.op.And(g.op.And(next_column, wide_pair), beyond), right, updated)
    a = g.op.Where(idle, a, updated)
    number = g.op.Add(pivot, g.const(1))
    here = g.op.And(g.op.Or(column, g.op.And(next_column, pair)), g.op.Not(inside))
    pivots = g.op.Where(here, g.op.Where(pair, g.op.Neg(number), number), pivots)
    is_first = g.op.And(g.op.And(failed, g.op.Not(inside)), g.op.Equal(info, g.const(0)))
    return [a, pivots, g.op.Where(is_first, g.op.Add(k, g.const(1)), info), pair]


def _pivot(g: GraphBuilder, rows: Value, k: Value, a: Value) -> tuple[Value, Value, Value]:
    """The row to exchange with, whether it makes a block of two, and whether the column is 0 or NaN: each [*batch, 1]."""
    dtype = dtype_of(a)
    rank = rank_of(a)
    zero, none = g.const(0.0, dtype), g.const(-1.0, dtype)
    size = g.op.Abs(a)
    column = take(g, size, k, -1)
    own = take(g, column, as_index(g, k), -1)
    below = g.op.Where(g.op.Greater(rows, k), column, none)
    largest = g.op.Max(reduce(g, "ReduceMax", below, [rank - 2], True), zero)
    row = g.op.ArgMax(below, axis=rank - 2, keepdims=1)
    chosen = unsqueeze(g, g.op.Equal(rows, row), rank - 1)
    across = reduce(g, "ReduceSum", g.op.Where(chosen, size, zero), [rank - 2], False)
    counted = g.op.And(g.op.GreaterOrEqual(rows, k), g.op.Not(g.op.Equal(rows, row)))
    in_row = reduce(g, "ReduceMax", g.op.Where(counted, across, zero), [rank - 2], True)
    diagonal = g.op.GatherElements(across, row, axis=rank - 2)
    alpha = g.const(_ALPHA, dtype)
    failed = g.op.Or(g.op.Equal(g.op.Max(own, largest), zero), g.op.IsNaN(own))
    bound = g.op.Mul(alpha, largest)
    stays = g.op.Or(failed, g.op.GreaterOrEqual(own, bound))
    stays = g.op.Or(stays, g.op.GreaterOrEqual(own, g.op.Mul(bound, g.op.Div(largest, in_row))))
    pair = g.op.And(g.op.Not(stays), g.op.Less(diagonal, g.op.Mul(alpha, in_row)))
    return g.op.Where(stays, k, row), pair, failed


def linalg_ldl_solve(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_ldl_solve(Tensor LD, Tensor pivots, Tensor B, *, bool hermitian=False) -> Tensor"""
    packed, pivots, b = node.args[:3]
    pivots = g.cast(pivots, INT64)
    n = g.dim(packed, -1)
    x = full(g, b, dtype_of(b), [*common_batch(g, packed, b), n, g.dim(b, -1)])
    inside = full(g, False, BOOL, [*batch_of(g, packed), 1, 1])
    rows = iota(g, n)
    x, _ = repeat(g, n, lambda k, *states: _forward(g, rows, packed, pivots, k, *states), x, inside)
    last = g.as_scalar(offset(g, n, -1))

    def back(j: Value, x: Value, inside: Value) -> Sequence[Value]:
        return _backward(g, rows, packed, pivots, g.op.Sub(last, j), x, inside)

    return repeat(g, n, back, x, inside)[0]


def _exchanged(g: GraphBuilder, rows: Value, x: Value, one: Value, other: Value, idle: Value) -> Value:
    """Two rows of each matrix exchanged, [*batch, 1, 1] each; none where it is idle."""
    column = unsqueeze(g, rows, 1)
    order = g.op.Where(g.op.Equal(column, one), other, g.op.Where(g.op.Equal(column, other), one, column))
    order = g.op.Expand(g.op.Where(idle, column, order), g.shape(x))
    return g.op.GatherElements(x, order, axis=rank_of(x) - 2)


def _pivot_at(g: GraphBuilder, pivots: Value, at: Value, inside: Value) -> tuple[Value, Value]:
    """The row that a column exchanges, and whether a block of two begins there: [*batch, 1, 1] each."""
    number = unsqueeze(g, take(g, pivots, at, -1), rank_of(pivots))
    pair = g.op.And(g.op.Less(number, g.const(0)), g.op.Not(inside))
    return g.op.Sub(g.op.Abs(number), g.const(1)), pair


def _forward(
    g: GraphBuilder, rows: Value, packed: Value, pivots: Value, k: Value, x: Value, inside: Value
) -> Sequence[Value]:
    """Column ``k`` of L and D eliminated."""
    dtype = dtype_of(x)
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    at = as_index(g, k)
    following = g.op.Min(g.op.Add(at, g.const(1)), g.op.Sub(as_index(g, g.as_scalar(g.dim(packed, -1))), g.const(1)))
    other, pair = _pivot_at(g, pivots, at, inside)
    x = _exchanged(g, rows, x, g.op.Add(at, g.cast(pair, INT64)), other, inside)
    column = unsqueeze(g, rows, 1)
    first, second = take(g, packed, at, -1), take(g, packed, following, -1)
    d11, d21, d22 = take(g, first, at, -2), take(g, first, following, -2), take(g, second, following, -2)
    upper, lower = take(g, x, at, -2), take(g, x, following, -2)
    after = g.op.Greater(column, g.op.Add(at, g.cast(pair, INT64)))
    change = g.op.Mul(g.op.Where(after, first, zero), upper)
    both = g.op.Add(change, g.op.Mul(g.op.Where(after, second, zero), lower))
    updated = g.op.Sub(x, g.op.Where(pair, both, change))
    d = g.op.Where(pair, d21, one)
    p, q, b, c = (g.op.Div(v, d) for v in (d11, d22, upper, lower))
    divisor = g.op.Sub(g.op.Mul(p, q), one)
    top = g.op.Where(pair, g.op.Div(g.op.Sub(g.op.Mul(q, b), c), divisor), g.op.Div(upper, d11))
    bottom = g.op.Div(g.op.Sub(g.op.Mul(p, c), b), divisor)
    updated = g.op.Where(g.op.Equal(column, at), top, updated)
    updated = g.op.Where(g.op.And(g.op.Equal(column, g.op.Add(at, g.const(1))), pair), bottom, updated)
    return [g.op.Where(inside, x, updated), pair]


def _backward(
    g: GraphBuilder, rows: Value, packed: Value, pivots: Value, k: Value, x: Value, inside: Value
) -> Sequence[Value]:
    """Row ``k`` of the transpose of L, and with a block of two the one before it."""
    at = as_index(g, k)
    previous = g.op.Max(g.op.Sub(at, g.const(1)), g.const([0]))
    other, pair = _pivot_at(g, pivots, at, inside)
    column = unsqueeze(g, rows, 1)
    rest = g.op.Where(g.op.Greater(column, at), x, g.const(0.0, dtype_of(x)))
    updated = x
    for place, applies in ((at, g.op.Not(inside)), (previous, pair)):
        product = g.op.MatMul(transpose(g, take(g, packed, place, -1)), rest)
        here = g.op.And(g.op.Equal(column, place), applies)
        updated = g.op.Where(here, g.op.Sub(x if place is at else updated, product), updated)
    return [_exchanged(g, rows, updated, at, other, inside), pair]


RULES: list[Rule] = [
    Rule("aten::linalg_ldl_factor_ex.default", linalg_ldl_factor_ex),
    Rule("aten::linalg_ldl_solve.default", linalg_ldl_solve),
]
