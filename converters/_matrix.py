"""Dense real matrices: loops over columns, and the factorizations that the linalg rules are built from.

Every function works on ``[*batch, m, n]`` as it stands: the loops run over rows or columns of the whole batch at once, by
operators that take any number of leading dimensions, so that batch and sizes may be dynamic or 0. What must not be read
is masked by Where, never by multiplying with 0, which would let NaN and infinities through.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.shapes import Size
from onnxplug.converters._axes import rank_of, reduce, unsqueeze
from onnxplug.interpret.node import FxNode

_INT64 = ir.DataType.INT64
_EPSILON = {ir.DataType.DOUBLE: 2.0**-52, ir.DataType.FLOAT: 2.0**-23}


def dtype_of(x: Value) -> ir.DataType:
    """The dtype of a value, which is known."""
    assert x.dtype is not None
    return x.dtype


def epsilon(dtype: ir.DataType) -> float:
    """The spacing of numbers at 1, as ``torch.finfo(dtype).eps``."""
    return _EPSILON[dtype]


def wanted(node: FxNode, index: int) -> bool:
    """Whether anything reads one of the results of a node."""
    users = node.fx.users
    if not all(user.target is operator.getitem for user in users):
        return True
    return any(user.args[1] == index and user.users for user in users)


# -- sizes and index grids ---------------------------------------------------------------------------------------------


def smaller(g: GraphBuilder, m: Size, n: Size) -> Size:
    """The lesser of two sizes."""
    if isinstance(m, int) and isinstance(n, int):
        return min(m, n)
    result: Value = g.op.Min(g.as_scalar(m), g.as_scalar(n))
    return result


def offset(g: GraphBuilder, size: Size, by: Size) -> Size:
    """The sum of two sizes."""
    if isinstance(size, int) and isinstance(by, int):
        return size + by
    result: Value = g.op.Add(g.as_scalar(size), g.as_scalar(by))
    return result


def iota(g: GraphBuilder, size: Size) -> Value:
    """The indices 0 … size - 1."""
    result: Value = g.op.Range(g.const(0), g.as_scalar(size), g.const(1))
    return result


def on_diagonal(g: GraphBuilder, m: Size, n: Size) -> Value:
    """A mask ``[m, n]`` of the diagonal."""
    result: Value = g.op.Equal(unsqueeze(g, iota(g, m), 1), unsqueeze(g, iota(g, n), 0))
    return result


def eye(g: GraphBuilder, m: Size, n: Size, dtype: ir.DataType) -> Value:
    """Ones on the diagonal of ``[m, n]``."""
    return g.cast(on_diagonal(g, m, n), dtype)


def full(g: GraphBuilder, value: float | Value, dtype: ir.DataType, sizes: Sequence[Size]) -> Value:
    """A tensor of these sizes with one value, or with a tensor broadcast to them."""
    if any(isinstance(size, int) and size == 0 for size in sizes):
        # ONNX Runtime takes an Expand from 1 to 0 for one that does nothing.
        value = 0.0
    number = value if isinstance(value, Value) else g.const(value, dtype)
    result: Value = g.op.Expand(number, g.vector(list(sizes)))
    return result


def batch_of(g: GraphBuilder, x: Value) -> list[Size]:
    """The sizes before the last two."""
    return g.dims(x)[:-2]


def common_batch(g: GraphBuilder, a: Value, b: Value) -> list[Size]:
    """The batch sizes to which two stacks of matrices broadcast."""
    first, second = batch_of(g, a), batch_of(g, b)
    rank = max(len(first), len(second))
    left: list[Size] = [*([1] * (rank - len(first))), *first]
    right: list[Size] = [*([1] * (rank - len(second))), *second]
    return [_common_size(g, m, n) for m, n in zip(left, right, strict=True)]


def _common_size(g: GraphBuilder, m: Size, n: Size) -> Size:
    if m is n or (isinstance(n, int) and n == 1):
        return m
    if isinstance(m, int):
        return n if m == 1 else m
    if isinstance(n, int):
        return n
    # One of two sizes that differ is 1, and the other one may be 0.
    result: Value = g.op.Where(g.op.Equal(m, g.const(1)), n, m)
    return result


def same_batch(g: GraphBuilder, a: Value, b: Value) -> bool:
    """Whether two stacks of matrices surely have one batch shape."""
    first, second = batch_of(g, a), batch_of(g, b)
    return len(first) == len(second) and all(
        m is n or (isinstance(m, int) and isinstance(n, int) and m == n) for m, n in zip(first, second, strict=True)
    )


# -- parts of matrices -------------------------------------------------------------------------------------------------


def transpose(g: GraphBuilder, x: Value) -> Value:
    """The last two axes swapped."""
    rank = rank_of(x)
    result: Value = g.op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])
    return result


def take(g: GraphBuilder, x: Value, index: Value, axis: int) -> Value:
    """``x`` at an index along an axis, which goes for a 0-dim index and stays for one of shape [1]."""
    result: Value = g.op.Gather(x, index, axis=axis % rank_of(x))
    return result


def cut(g: GraphBuilder, x: Value, axis: int, start: Size, stop: Size | None = None) -> Value:
    """``x[start:stop]`` along an axis."""
    end = g.const(np.array([np.iinfo(np.int64).max])) if stop is None else g.as_vector(stop)
    result: Value = g.op.Slice(x, g.as_vector(start), end, g.const(np.array([axis % rank_of(x)])))
    return result


def triangle(g: GraphBuilder, x: Value, *, upper: bool, diagonal: float | None = None, strict: bool = False) -> Value:
    """One triangle of each matrix, zeros elsewhere; ``diagonal`` stands in the diagonal's place."""
    dtype = dtype_of(x)
    rows, columns = unsqueeze(g, iota(g, g.dim(x, -2)), 1), unsqueeze(g, iota(g, g.dim(x, -1)), 0)
    less, more = (rows, columns) if upper else (columns, rows)
    compare = g.op.Less if strict or diagonal is not None else g.op.LessOrEqual
    outside = g.const(0.0, dtype)
    if diagonal is not None:
        outside = g.op.Where(g.op.Equal(rows, columns), g.const(diagonal, dtype), outside)
    result: Value = g.op.Where(compare(less, more), x, outside)
    return result


def diagonal(g: GraphBuilder, x: Value) -> Value:
    """The diagonal of each matrix, ``[*batch, min(m, n)]``."""
    m, n = g.dim(x, -2), g.dim(x, -1)
    picked = g.op.Where(on_diagonal(g, m, n), x, g.const(0.0, dtype_of(x)))
    wide = isinstance(m, int) and isinstance(n, int) and m < n
    result = reduce(g, "ReduceSum", picked, [rank_of(x) - (1 if wide else 2)], False)
    return result if isinstance(m, int) and isinstance(n, int) else cut(g, result, -1, 0, smaller(g, m, n))


def rearranged(g: GraphBuilder, x: Value, order: Value, axis: int) -> Value:
    """The rows (axis -2) or columns (axis -1) of each matrix in its own order ``[*batch, size]``."""
    rank = rank_of(x)
    if rank == 2 and rank_of(order) == 1:
        return take(g, x, order, axis)
    sizes = [*g.dims(x)]
    sizes[axis] = g.dim(order, -1)
    index = full(g, unsqueeze(g, order, rank - 1 if axis == -2 else rank - 2), _INT64, sizes)
    result: Value = g.op.GatherElements(x, index, axis=axis % rank)
    return result


def largest(g: GraphBuilder, x: Value) -> Value:
    """The largest absolute value of each matrix, ``[*batch, 1, 1]``."""
    rank = rank_of(x)
    return reduce(g, "ReduceMax", g.op.Abs(x), [rank - 2, rank - 1], True)


def scale_of(g: GraphBuilder, x: Value) -> Value:
    """A power of two near the largest element of each matrix, by which squares neither overflow nor underflow.

    1 for matrices that are zero, empty or not finite.
    """
    dtype = dtype_of(x)
    top = largest(g, x)
    usable = g.op.And(g.op.Greater(top, g.const(0.0, dtype)), g.op.Less(top, g.const(math.inf, dtype)))
    exponent = g.op.Floor(g.op.Mul(g.op.Log(g.op.Where(usable, top, g.const(1.0, dtype))), 1 / math.log(2)))
    result: Value = g.op.Pow(g.const(2.0, dtype), exponent)
    return result


def poison(g: GraphBuilder, x: Value) -> Value:
    """0 for a finite matrix, NaN for one that holds NaN or an infinity: ``[*batch, 1, 1]``, to be added to results."""
    rank = rank_of(x)
    return reduce(g, "ReduceSum", g.op.Mul(x, g.const(0.0, dtype_of(x))), [rank - 2, rank - 1], True)


# -- loops -------------------------------------------------------------------------------------------------------------


def repeat(
    g: GraphBuilder,
    count: Size,
    step: Callable[..., Sequence[Value]],
    *states: Value,
    until: bool = False,
) -> list[Value]:
    """The states after ``count`` steps ``step(j, *states)``, a Loop that is as large for 3 columns as for 300.

    With ``until`` a step returns, before the states, whether to go on. The states keep their dtypes and shapes.
    """
    if isinstance(count, int) and count <= 0:
        return list(states)
    if isinstance(count, int) and count == 1 and not until:
        return list(step(g.const(0), *states))

    def body(j: Value, condition: Value, *inner: Value) -> list[Value]:
        results = list(step(j, *inner))
        return results if until else [condition, *results]

    inputs: list[tuple[ir.DataType, Any]] = [(_INT64, ()), (ir.DataType.BOOL, ())]
    inputs += [(dtype_of(s), s.shape.dims if s.shape is not None else None) for s in states]
    graph = g.subgraph(body, inputs)
    found = g.op.Loop(g.as_scalar(count), g.const(True), *states, body=graph, _outputs=len(states))
    results = [found] if len(states) == 1 else list(found)
    for result, state in zip(results, states, strict=True):
        result.type = state.type
        result.shape = state.shape
    return results


def as_index(g: GraphBuilder, j: Value) -> Value:
    """A loop's counter with shape [1], to keep the axis that it picks from."""
    return g.as_vector(j)


# -- LU ----------------------------------------------------------------------------------------------------------------


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

    On ``[A | B]`` of m rows, A square, the columns of B become ``inv(L) P B``. The pivot is what LAPACK's getf2 takes: the
    first of the largest, but a NaN in the diagonal's place stays there. A pivot of 0 divides nothing.
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
            size = g.op.Abs(take(g, a, j, -1))
            candidate = g.op.And(g.op.GreaterOrEqual(size, zero), g.op.GreaterOrEqual(rows, j))
            score = g.op.Where(candidate, size, g.op.Where(here, g.const(math.inf, dtype), g.const(-1.0, dtype)))
            pivot = g.op.ArgMax(score, axis=rank - 2, keepdims=1)
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
        orders.append(full(g, rows, _INT64, [*batch, m]))
    if pivots:
        orders.append(full(g, 0, _INT64, [*batch, steps]))
    packed, *rest = repeat(g, steps, step, a, *orders)
    return LU(packed, rest.pop(0) if permutation else None, rest.pop(0) if pivots else None)


def permutation_of(g: GraphBuilder, pivots: Value, m: Size) -> Value:
    """The permutation that LAPACK's pivots (int64, from 1) stand for: its rows' order, ``[*batch, m]``."""
    rows = iota(g, m)
    rank = rank_of(pivots)

    def step(j: Value, order: Value) -> list[Value]:
        at = as_index(g, j)
        other = g.op.Sub(take(g, pivots, at, -1), g.const(1))
        here, there = take(g, order, at, -1), g.op.GatherElements(order, other, axis=rank - 1)
        moved = g.op.Where(g.op.Equal(rows, other), here, order)
        return [g.op.Where(g.op.Equal(rows, j), there, moved)]

    start = full(g, rows, _INT64, [*g.dims(pivots)[:-1], m])
    return repeat(g, g.dim(pivots, -1), step, start)[0]


def first_zero(g: GraphBuilder, packed: Value) -> Value:
    """LAPACK's ``info`` of an LU factorization: the number of the first zero on U's diagonal, 0 when there is none."""
    found = g.op.Equal(diagonal(g, packed), g.const(0.0, dtype_of(packed)))
    # Counted from the end, so that the first one is the largest and none at all is 0.
    count = g.as_scalar(smaller(g, g.dim(packed, -2), g.dim(packed, -1)))
    score = g.op.Where(found, g.op.Sub(count, iota(g, smaller(g, g.dim(packed, -2), g.dim(packed, -1)))), g.const(0))
    none = full(g, 0, _INT64, [*batch_of(g, packed), 1])
    best = reduce(g, "ReduceMax", g.op.Concat(score, none, axis=rank_of(packed) - 2), [rank_of(packed) - 2], False)
    first = g.op.Sub(g.op.Add(count, g.const(1)), best)
    return g.cast(g.op.Where(g.op.Equal(best, g.const(0)), best, first), ir.DataType.INT32)


def solve_triangular(g: GraphBuilder, t: Value, b: Value, *, upper: bool, unit: bool = False) -> Value:
    """``X`` of ``T X = B`` by substitution, a row of X a step (Golub & Van Loan, 3.1.1); the batches broadcast.

    The other triangle of T is not read, nor is its diagonal when it is said to be ones.
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


# -- Cholesky ----------------------------------------------------------------------------------------------------------


def cholesky(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """``L`` with ``A = L L^T`` from A's lower triangle, a column a step (Golub & Van Loan, 4.2.4), and LAPACK's ``info``.

    From the first leading minor that is not positive on, L is NaN: torch raises there, or leaves it unspecified.
    """
    dtype = dtype_of(a)
    n = g.dim(a, -1)
    columns = iota(g, n)
    rows = unsqueeze(g, columns, 1)
    rank = rank_of(a)

    def step(j: Value, lower: Value, info: Value) -> list[Value]:
        at = as_index(g, j)
        known = transpose(g, take(g, lower, at, -2))
        rest = g.op.Sub(take(g, a, at, -1), g.op.MatMul(lower, known))
        head = take(g, rest, at, -2)
        positive = g.op.Greater(head, g.const(0.0, dtype))
        root = g.op.Sqrt(g.op.Where(positive, head, g.const(math.nan, dtype)))
        column = g.op.Where(g.op.Greater(rows, j), g.op.Div(rest, root), g.const(0.0, dtype))
        column = g.op.Where(g.op.Equal(rows, j), root, column)
        bad = g.op.Not(g.op.Squeeze(positive, g.const(np.array([rank - 2, rank - 1]))))
        first = g.op.And(bad, g.op.Equal(info, g.const(0)))
        return [
            g.op.Where(g.op.Equal(columns, j), column, lower),
            g.op.Where(first, g.op.Add(j, g.const(1)), info),
        ]

    start = full(g, 0.0, dtype, g.dims(a))
    lower, info = repeat(g, n, step, start, full(g, 0, _INT64, batch_of(g, a)))
    return lower, g.cast(info, ir.DataType.INT32)


# -- QR ----------------------------------------------------------------------------------------------------------------


def householder(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """QR by reflections, as LAPACK's geqrf returns it: R and below it the vectors, and ``tau``.

    Golub & Van Loan, 5.2.1, with LAPACK's signs: the new diagonal has the opposite sign of the old one, and a column that
    is zero below the diagonal is left alone (tau is 0).
    """
    dtype = dtype_of(a)
    rank = rank_of(a)
    m, n = g.dim(a, -2), g.dim(a, -1)
    steps = smaller(g, m, n)
    columns, places = iota(g, n), iota(g, steps)
    rows = unsqueeze(g, iota(g, m), 1)
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)

    def step(j: Value, a: Value, taus: Value) -> list[Value]:
        at = as_index(g, j)
        here, below = g.op.Equal(rows, j), g.op.Greater(rows, j)
        column = take(g, a, at, -1)
        head = take(g, column, at, -2)
        tail = g.op.Where(below, column, zero)
        # By the sum: ONNX Runtime's ReduceMax takes no notice of NaN.
        flat = g.op.Equal(reduce(g, "ReduceSum", g.op.Abs(tail), [rank - 2], True), zero)
        top = reduce(g, "ReduceMax", g.op.Abs(tail), [rank - 2], True)
        # Scaled, so that the squares neither overflow nor vanish.
        top = g.op.Max(g.op.Where(g.op.Equal(top, zero), one, top), g.op.Abs(head))
        part = g.op.Div(g.op.Where(here, column, tail), top)
        size = g.op.Mul(top, g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(part, part), [rank - 2], True)))
        target = g.op.Where(g.op.Less(head, zero), size, g.op.Neg(size))
        target = g.op.Where(flat, head, target)
        tau = g.op.Where(flat, zero, g.op.Div(g.op.Sub(target, head), target))
        vector = g.op.Where(flat, zero, g.op.Div(tail, g.op.Sub(head, target)))
        vector = g.op.Where(here, one, vector)
        reflected = g.op.Sub(a, g.op.Mul(g.op.Mul(tau, vector), g.op.MatMul(transpose(g, vector), a)))
        done = g.op.Where(below, vector, g.op.Where(here, target, column))
        # Finished rows are kept as they are: 0 times NaN would get into them.
        changed = g.op.And(g.op.GreaterOrEqual(rows, j), g.op.Greater(columns, j))
        a = g.op.Where(changed, reflected, g.op.Where(g.op.Equal(columns, j), done, a))
        flat_tau = g.op.Squeeze(tau, g.const(np.array([rank - 1])))
        return [a, g.op.Where(g.op.Equal(places, j), flat_tau, taus)]

    packed, taus = repeat(g, steps, step, a, full(g, 0.0, dtype, [*batch_of(g, a), steps]))
    return packed, taus


def reflect(g: GraphBuilder, packed: Value, tau: Value, x: Value, *, forward: bool = False) -> Value:
    """``H_1 … H_k X`` for the reflections of :func:`householder`; ``H_k … H_1 X``, its transpose, when ``forward``."""
    dtype = dtype_of(packed)
    rows = unsqueeze(g, iota(g, g.dim(packed, -2)), 1)
    count = g.dim(tau, -1)
    taus = unsqueeze(g, tau, rank_of(tau))
    last = offset(g, count, -1)

    def step(i: Value, x: Value) -> list[Value]:
        j = i if forward else g.op.Sub(g.as_scalar(last), i)
        at = as_index(g, j)
        vector = g.op.Where(g.op.Greater(rows, j), take(g, packed, at, -1), g.const(0.0, dtype))
        vector = g.op.Where(g.op.Equal(rows, j), g.const(1.0, dtype), vector)
        scaled = g.op.Mul(take(g, taus, at, -2), vector)
        reflected = g.op.Sub(x, g.op.Mul(scaled, g.op.MatMul(transpose(g, vector), x)))
        return [g.op.Where(g.op.GreaterOrEqual(rows, j), reflected, x)]

    return repeat(g, count, step, x)[0]


def orthogonal(g: GraphBuilder, packed: Value, tau: Value, columns: Size) -> Value:
    """The first ``columns`` columns of Q from :func:`householder`'s result."""
    dtype = dtype_of(packed)
    m = g.dim(packed, -2)
    start = full(g, eye(g, m, columns, dtype), dtype, [*batch_of(g, packed), m, columns])
    return reflect(g, packed, tau, start)
