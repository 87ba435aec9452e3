"""LU factors of dense matrices, and solutions of linear systems by them."""

from __future__ import annotations

import math
from typing import NamedTuple

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import INT32, INT64
from onnxplug.converters.helpers.grids import batch_of, common_batch, eye, full, iota, offset, smaller
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import cut, diagonal, dtype_of, rearranged, take, triangle
from onnxplug.converters.helpers.reductions import reduce


class LU(NamedTuple):
    """Factors of ``A[permutation] = L U``.

    Attributes:
        packed: U, and below it L without its unit diagonal, ``[*batch, m, n]``.
        permutation: Rows of A in the order of L's, int64 ``[*batch, m]``.
        pivots: The row each step swapped its own with, counted from 1 as by LAPACK, int64 ``[*batch, min(m, n)]``.
    """

    packed: Value
    permutation: Value | None
    pivots: Value | None


def lu(g: GraphBuilder, a: Value, *, permutation: bool = False, pivots: bool = False, pivoting: bool = True) -> LU:
    """LU by outer products with partial pivoting (Golub & Van Loan, 3.4.1), for any m and n.

    On ``[A | B]`` of m rows, A square, the columns of B become ``inv(L) P B``. The pivot is that of LAPACK's getf2: the
    first of the largest elements, unless the diagonal element is NaN. There is no division by a pivot of 0.
    """
    dtype = dtype_of(a)
    rank = rank_of(a)
    m, n = g.dim(a, -2), g.dim(a, -1)
    steps = smaller(g, m, n)
    rows, columns, places = iota(g, m), iota(g, n), iota(g, steps)
    batch = batch_of(g, a)
    zero = g.const(0.0, dtype)

    def step(j: Value, a: Value, *orders: Value) -> list[Value]:
        at = as_index(g, j)
        here, below = g.op.Equal(rows, j), g.op.Greater(rows, j)
        if pivoting:
            pivot = _pivot(g, a, j, rows)
            order = g.op.Where(here, pivot, g.op.Where(g.op.Equal(rows, pivot), j, rows))
            a = rearranged(g, a, order, -2)
        column = take(g, a, at, -1)
        head = take(g, column, at, -2)
        factor = g.op.Where(g.op.Equal(head, zero), column, g.op.Div(column, head))
        update = g.op.Sub(a, g.op.Mul(factor, take(g, a, at, -2)))
        update = g.op.Where(g.op.Equal(columns, j), factor, update)
        change = g.op.And(unsqueeze(g, below, 1), g.op.GreaterOrEqual(columns, j))
        results = [g.op.Where(change, update, a)]
        rest = list(orders)
        if permutation:
            known = rest.pop(0)
            if pivoting:
                known = take(g, known, order, 0) if rank == 2 else g.op.GatherElements(known, order, axis=rank - 2)
            results.append(known)
        if pivots:
            chosen = g.op.Add(pivot if pivoting else j, g.const(1))
            results.append(g.op.Where(g.op.Equal(places, j), chosen, rest.pop(0)))
        return results

    orders = []
    if permutation:
        orders.append(full(g, rows, INT64, [*batch, m]))
    if pivots:
        orders.append(full(g, 0, INT64, [*batch, steps]))
    packed, *rest = repeat(g, steps, step, a, *orders)
    return LU(packed, rest.pop(0) if permutation else None, rest.pop(0) if pivots else None)


def _pivot(g: GraphBuilder, a: Value, j: Value, rows: Value) -> Value:
    """The row of step ``j``'s pivot: the first of the largest elements from the diagonal on, or the diagonal's NaN."""
    size = g.op.Abs(take(g, a, j, -1))
    candidate = g.op.And(g.op.GreaterOrEqual(size, g.const(0.0, dtype_of(a))), g.op.GreaterOrEqual(rows, j))
    diagonal_first = g.op.Where(g.op.Equal(rows, j), g.const(math.inf, dtype_of(a)), g.const(-1.0, dtype_of(a)))
    return g.op.ArgMax(g.op.Where(candidate, size, diagonal_first), axis=rank_of(a) - 2, keepdims=1)


def permutation_of(g: GraphBuilder, pivots: Value, m: Size) -> Value:
    """The permutation of LAPACK's pivots (int64, from 1): the order of the rows, ``[*batch, m]``."""
    rows = iota(g, m)
    rank = rank_of(pivots)

    def step(j: Value, order: Value) -> list[Value]:
        at = as_index(g, j)
        other = g.op.Sub(take(g, pivots, at, -1), g.const(1))
        here, there = take(g, order, at, -1), g.op.GatherElements(order, other, axis=rank - 1)
        moved = g.op.Where(g.op.Equal(rows, other), here, order)
        return [g.op.Where(g.op.Equal(rows, j), there, moved)]

    start = full(g, rows, INT64, [*g.dims(pivots)[:-1], m])
    return repeat(g, g.dim(pivots, -1), step, start)[0]


def first_zero(g: GraphBuilder, packed: Value) -> Value:
    """LAPACK's ``info`` of an LU factorization: the number of the first zero on U's diagonal, 0 when there is none."""
    is_zero = g.op.Equal(diagonal(g, packed), g.const(0.0, dtype_of(packed)))
    # Counted from the end, so that the first is the largest number and none at all is 0.
    count = g.as_scalar(smaller(g, g.dim(packed, -2), g.dim(packed, -1)))
    score = g.op.Where(is_zero, g.op.Sub(count, iota(g, smaller(g, g.dim(packed, -2), g.dim(packed, -1)))), g.const(0))
    none = full(g, 0, INT64, [*batch_of(g, packed), 1])
    best = reduce(g, "ReduceMax", g.op.Concat(score, none, axis=rank_of(packed) - 2), [rank_of(packed) - 2], False)
    first = g.op.Sub(g.op.Add(count, g.const(1)), best)
    return g.cast(g.op.Where(g.op.Equal(best, g.const(0)), best, first), INT32)


def solve_triangular(g: GraphBuilder, t: Value, b: Value, *, upper: bool, unit: bool = False) -> Value:
    """``X`` of ``T X = B`` by substitution, a row of X a step (Golub & Van Loan, 3.1.1); the batches broadcast.

    The other triangle of T is not read, nor is its diagonal if it is declared to be ones.
    """
    n = g.dim(t, -1)
    rows = unsqueeze(g, iota(g, n), 1)
    strict = triangle(g, t, upper=upper, strict=True)
    last = offset(g, n, -1)

    def step(i: Value, x: Value) -> list[Value]:
        j = g.op.Sub(g.as_scalar(last), i) if upper else i
        at = as_index(g, j)
        rest = g.op.Sub(take(g, b, at, -2), g.op.MatMul(take(g, strict, at, -2), x))
        if not unit:
            rest = g.op.Div(rest, take(g, take(g, t, at, -2), at, -1))
        return [g.op.Where(g.op.Equal(rows, j), rest, x)]

    start = full(g, 0.0, dtype_of(b), [*common_batch(g, t, b), n, g.dim(b, -1)])
    return repeat(g, n, step, start)[0]


def eliminated(g: GraphBuilder, a: Value, b: Value) -> tuple[Value, Value]:
    """A's LU factors, and ``inv(L) P B``, computed in one loop."""
    n = g.dim(a, -1)
    both = lu(g, g.op.Concat(a, b, axis=rank_of(a) - 1)).packed
    return cut(g, both, -1, 0, n), cut(g, both, -1, n)


def inverse(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """The inverse, and LAPACK's ``info``.

    LU of ``[A | I]``, which gives ``inv(L) P`` on the right, then ``inv(U)`` of that by substitution.
    """
    n = g.dim(a, -1)
    dtype = dtype_of(a)
    packed, right = eliminated(g, a, full(g, eye(g, n, n, dtype), dtype, g.dims(a)))
    return solve_triangular(g, packed, right, upper=True), first_zero(g, packed)
