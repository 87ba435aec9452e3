"""LDL factorisations of symmetric and Hermitian indefinite matrices, and solutions by them, as LAPACK computes them.

The steps are the same for real and for complex matrices: a *number* is a real tensor, or the two parts of a complex tensor. The
mirror of a matrix is its transpose; of a Hermitian matrix, the conjugate of its transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.complex_pairs import bilinear, c_conj, c_div
from onnxplug.converters.helpers.dtypes import BOOL, INT32, INT64
from onnxplug.converters.helpers.grids import batch_of, common_batch, full, iota, offset, on_diagonal
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import dtype_of, rearranged, take, transpose, triangle
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

Number = Value | Complex

#: The bound of Bunch and Kaufman, 1977, on how much smaller than its column a pivot may be.
_ALPHA = (1 + math.sqrt(17)) / 8


def _parts(x: Number) -> list[Value]:
    return [x.real, x.imag] if isinstance(x, Complex) else [x]


def _joined(parts: Sequence[Value]) -> Number:
    return Complex(*parts) if len(parts) == 2 else parts[0]


def _each(function: Callable[..., Value], *numbers: Number) -> Number:
    """A function of real tensors on each part of some numbers."""
    return _joined([function(*parts) for parts in zip(*map(_parts, numbers), strict=True)])


def _where(g: GraphBuilder, condition: Value, x: Number, y: Number) -> Number:
    return _each(partial(g.op.Where, condition), x, y)


def _or_zero(g: GraphBuilder, condition: Value, x: Number) -> Number:
    return _each(lambda part: g.op.Where(condition, part, g.const(0.0, dtype_of(part))), x)


def _mul(g: GraphBuilder, x: Number, y: Number, product: Callable[..., Value] | None = None) -> Number:
    product = product or g.op.Mul
    if isinstance(x, Complex) and isinstance(y, Complex):
        return bilinear(g, product, x, y)
    return product(x, y)


def _div(g: GraphBuilder, x: Number, y: Number) -> Number:
    if isinstance(x, Complex) and isinstance(y, Complex):
        return c_div(g, x, y)
    return g.op.Div(x, y)


def _less_one(g: GraphBuilder, x: Number) -> Number:
    real, *imag = _parts(x)
    return _joined([g.op.Sub(real, g.const(1.0, dtype_of(real))), *imag])


def _conj(g: GraphBuilder, x: Number, hermitian: bool) -> Number:
    return c_conj(g, x) if hermitian and isinstance(x, Complex) else x


def _mirror(g: GraphBuilder, x: Number, hermitian: bool) -> Number:
    return _conj(g, _each(partial(transpose, g), x), hermitian)


def _take(g: GraphBuilder, x: Number, index: Value, axis: int) -> Number:
    return _each(lambda part: take(g, part, index, axis), x)


def linalg_ldl_factor_ex(g: GraphBuilder, node: FxNode) -> list[Number]:
    """linalg_ldl_factor_ex(Tensor self, *, bool hermitian=False, bool check_errors=False) -> (Tensor LD, Tensor pivots, Tensor info)

    Of the lower triangle, [*batch, n, n]. The pivots count from 1; two negative pivots mark a block of 2 × 2.
    """  # noqa: E501
    a, hermitian = node.args[:2]
    lower = _each(lambda part: triangle(g, part, upper=False), a)
    mirrored = _mirror(g, _each(lambda part: triangle(g, part, upper=False, strict=True), a), hermitian)
    whole = _parts(_real_diagonal(g, _each(g.op.Add, lower, mirrored), hermitian))
    batch, n = batch_of(g, whole[0]), g.dim(whole[0], -1)
    pivots, info = full(g, 0, INT64, [*batch, n]), full(g, 0, INT64, [*batch, 1])
    inside = full(g, False, BOOL, [*batch, 1])
    rows = iota(g, n)

    def step(k: Value, *states: Value) -> Sequence[Value]:
        *parts, pivots, info, inside = states
        return _step(g, rows, k, _joined(parts), pivots, info, inside, hermitian)

    *packed, pivots, info, _ = repeat(g, n, step, *whole, pivots, info, inside)
    info = g.op.Squeeze(info, g.const([rank_of(info) - 1]))
    return [_joined([triangle(g, part, upper=False) for part in packed]), g.cast(pivots, INT32), g.cast(info, INT32)]


def _real_diagonal(g: GraphBuilder, a: Number, hermitian: bool) -> Number:
    """A matrix; the diagonal of a Hermitian matrix is made real, whatever the input or rounding has there."""
    if not hermitian or not isinstance(a, Complex):
        return a
    diagonal = on_diagonal(g, g.dim(a.imag, -2), g.dim(a.imag, -1))
    return Complex(a.real, g.op.Where(diagonal, g.const(0.0, dtype_of(a.imag)), a.imag))


def _step(
    g: GraphBuilder, rows: Value, k: Value, a: Number, pivots: Value, info: Value, inside: Value, hermitian: bool
) -> Sequence[Value]:
    """One column, unless it is the second column of a block (``inside``, [*batch, 1])."""
    rank = rank_of(pivots) + 1
    at = as_index(g, k)
    pivot, pair, failed = _pivot(g, rows, k, a)
    pair = g.op.And(pair, g.op.Not(inside))
    target = g.op.Add(k, g.cast(pair, INT64))
    order = g.op.Where(g.op.Equal(rows, target), pivot, g.op.Where(g.op.Equal(rows, pivot), target, rows))
    order = g.op.Where(inside, rows, order)
    later = g.op.GreaterOrEqual(rows, k)
    trailing = g.op.And(unsqueeze(g, later, 1), later)
    a = _where(g, trailing, _each(lambda part: rearranged(g, rearranged(g, part, order, -2), order, -1), a), a)
    following = g.op.Min(g.op.Add(at, g.const(1)), g.op.Sub(as_index(g, g.as_scalar(g.dim(pivots, -1))), g.const(1)))
    first, second = _take(g, a, at, -1), _take(g, a, following, -1)
    d11, d21, d22 = _take(g, first, at, -2), _take(g, first, following, -2), _take(g, second, following, -2)
    d12 = _conj(g, d21, hermitian)
    wide_pair, idle = unsqueeze(g, pair, rank - 1), unsqueeze(g, g.op.Or(inside, failed), rank - 1)
    rest = unsqueeze(g, g.op.Greater(rows, k), 1)
    beyond = unsqueeze(g, g.op.Greater(rows, g.op.Add(k, g.const(1))), 1)
    # A single pivot.
    x = _or_zero(g, rest, first)
    single = _div(g, x, d11)
    # A block of two.
    upper, lower = _div(g, d22, d21), _div(g, d11, d12)
    divisor = _mul(g, d12, _less_one(g, _mul(g, upper, lower)))
    p, q = _or_zero(g, beyond, first), _or_zero(g, beyond, second)
    left = _div(g, _each(g.op.Sub, _mul(g, upper, p), q), divisor)
    right = _div(g, _each(g.op.Sub, _mul(g, lower, q), p), _conj(g, divisor, hermitian))
    by_pair = _each(g.op.Add, _mul(g, left, _mirror(g, p, hermitian)), _mul(g, right, _mirror(g, q, hermitian)))
    change = _where(g, wide_pair, by_pair, _mul(g, single, _mirror(g, x, hermitian)))
    column, next_column = g.op.Equal(rows, k), g.op.Equal(rows, g.op.Add(k, g.const(1)))
    updated = _real_diagonal(g, _each(g.op.Sub, a, change), hermitian)
    factor = _where(g, wide_pair, left, single)
    place = g.op.And(g.op.And(column, rest), g.op.Or(g.op.Not(wide_pair), beyond))
    updated = _where(g, place, factor, updated)
    updated = _where(g, g.op.And(g.op.And(next_column, wide_pair), beyond), right, updated)
    a = _where(g, idle, a, updated)
    number = g.op.Add(pivot, g.const(1))
    here = g.op.And(g.op.Or(column, g.op.And(next_column, pair)), g.op.Not(inside))
    pivots = g.op.Where(here, g.op.Where(pair, g.op.Neg(number), number), pivots)
    is_first = g.op.And(g.op.And(failed, g.op.Not(inside)), g.op.Equal(info, g.const(0)))
    return [*_parts(a), pivots, g.op.Where(is_first, g.op.Add(k, g.const(1)), info), pair]


def _pivot(g: GraphBuilder, rows: Value, k: Value, a: Number) -> tuple[Value, Value, Value]:
    """The row to exchange with, whether it makes a block of two, and whether the column is 0 or NaN: each [*batch, 1].

    LAPACK takes the sum of the absolute values of its parts for the size of a complex number.
    """
    size = g.op.Sum(*(g.op.Abs(part) for part in _parts(a)))
    dtype, rank = dtype_of(size), rank_of(size)
    zero, none = g.const(0.0, dtype), g.const(-1.0, dtype)
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


def linalg_ldl_solve(g: GraphBuilder, node: FxNode) -> Number:
    """linalg_ldl_solve(Tensor LD, Tensor pivots, Tensor B, *, bool hermitian=False) -> Tensor"""
    packed, pivots, b, hermitian = node.args
    packed, pivots = _real_diagonal(g, packed, hermitian), g.cast(pivots, INT64)
    like, right = _parts(packed)[0], _parts(b)[0]
    n = g.dim(like, -1)
    sizes = [*common_batch(g, like, right), n, g.dim(right, -1)]
    x = [full(g, part, dtype_of(part), sizes) for part in _parts(b)]
    inside = full(g, False, BOOL, [*batch_of(g, like), 1, 1])
    rows = iota(g, n)
    last = g.as_scalar(offset(g, n, -1))

    def forth(k: Value, *states: Value) -> Sequence[Value]:
        return _forward(g, rows, packed, pivots, k, _joined(states[:-1]), states[-1], hermitian)

    def back(j: Value, *states: Value) -> Sequence[Value]:
        return _backward(g, rows, packed, pivots, g.op.Sub(last, j), _joined(states[:-1]), states[-1], hermitian)

    *x, _ = repeat(g, n, forth, *x, inside)
    *x, _ = repeat(g, n, back, *x, inside)
    return _joined(x)


def _exchanged(g: GraphBuilder, rows: Value, x: Number, one: Value, other: Value, idle: Value) -> Number:
    """Two rows of each matrix exchanged, [*batch, 1, 1] each; none where it is idle."""
    column = unsqueeze(g, rows, 1)
    order = g.op.Where(g.op.Equal(column, one), other, g.op.Where(g.op.Equal(column, other), one, column))
    like = _parts(x)[0]
    order = g.op.Expand(g.op.Where(idle, column, order), g.shape(like))
    return _each(lambda part: g.op.GatherElements(part, order, axis=rank_of(like) - 2), x)


def _pivot_at(g: GraphBuilder, pivots: Value, at: Value, inside: Value) -> tuple[Value, Value]:
    """The row that a column exchanges, and whether a block of two begins there: [*batch, 1, 1] each."""
    number = unsqueeze(g, take(g, pivots, at, -1), rank_of(pivots))
    pair = g.op.And(g.op.Less(number, g.const(0)), g.op.Not(inside))
    return g.op.Sub(g.op.Abs(number), g.const(1)), pair


def _forward(
    g: GraphBuilder, rows: Value, packed: Number, pivots: Value, k: Value, x: Number, inside: Value, hermitian: bool
) -> Sequence[Value]:
    """Column ``k`` of L and D eliminated."""
    at = as_index(g, k)
    following = g.op.Min(g.op.Add(at, g.const(1)), g.op.Sub(as_index(g, g.as_scalar(g.dim(pivots, -1))), g.const(1)))
    other, pair = _pivot_at(g, pivots, at, inside)
    x = _exchanged(g, rows, x, g.op.Add(at, g.cast(pair, INT64)), other, inside)
    column = unsqueeze(g, rows, 1)
    first, second = _take(g, packed, at, -1), _take(g, packed, following, -1)
    d11, d21, d22 = _take(g, first, at, -2), _take(g, first, following, -2), _take(g, second, following, -2)
    d12 = _conj(g, d21, hermitian)
    upper, lower = _take(g, x, at, -2), _take(g, x, following, -2)
    after = g.op.Greater(column, g.op.Add(at, g.cast(pair, INT64)))
    change = _mul(g, _or_zero(g, after, first), upper)
    both = _each(g.op.Add, change, _mul(g, _or_zero(g, after, second), lower))
    updated = _each(g.op.Sub, x, _where(g, pair, both, change))
    p, q, b, c = _div(g, d11, d12), _div(g, d22, d21), _div(g, upper, d12), _div(g, lower, d21)
    divisor = _less_one(g, _mul(g, p, q))
    top = _where(g, pair, _div(g, _each(g.op.Sub, _mul(g, q, b), c), divisor), _div(g, upper, d11))
    bottom = _div(g, _each(g.op.Sub, _mul(g, p, c), b), divisor)
    updated = _where(g, g.op.Equal(column, at), top, updated)
    updated = _where(g, g.op.And(g.op.Equal(column, g.op.Add(at, g.const(1))), pair), bottom, updated)
    return [*_parts(_where(g, inside, x, updated)), pair]


def _backward(
    g: GraphBuilder, rows: Value, packed: Number, pivots: Value, k: Value, x: Number, inside: Value, hermitian: bool
) -> Sequence[Value]:
    """Row ``k`` of the mirror of L, and with a block of two the row before it."""
    at = as_index(g, k)
    previous = g.op.Max(g.op.Sub(at, g.const(1)), g.const([0]))
    other, pair = _pivot_at(g, pivots, at, inside)
    column = unsqueeze(g, rows, 1)
    rest = _or_zero(g, g.op.Greater(column, at), x)
    updated = x
    for place, applies in ((at, g.op.Not(inside)), (previous, pair)):
        product = _mul(g, _mirror(g, _take(g, packed, place, -1), hermitian), rest, g.op.MatMul)
        here = g.op.And(g.op.Equal(column, place), applies)
        updated = _where(g, here, _each(g.op.Sub, x if place is at else updated, product), updated)
    return [*_parts(_exchanged(g, rows, updated, at, other, inside)), pair]


RULES: list[Rule] = [
    Rule("aten::linalg_ldl_factor_ex.default", linalg_ldl_factor_ex),
    Rule("aten::linalg_ldl_solve.default", linalg_ldl_solve),
    complex_rule("linalg_ldl_factor_ex.default", linalg_ldl_factor_ex),
    complex_rule("linalg_ldl_solve.default", linalg_ldl_solve),
]
