"""QR factors of dense matrices by Householder reflections."""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.grids import batch_of, eye, full, iota, offset, smaller
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import dtype_of, take, transpose
from onnxplug.converters.helpers.reductions import reduce


def householder(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """QR by reflections, as LAPACK's geqrf returns it: R and below it the vectors, and ``tau``.

    Golub & Van Loan, 5.2.1, with LAPACK's signs: the new diagonal has the opposite sign of the old diagonal, and a column that
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
        # A sum finds NaN, which ONNX Runtime's ReduceMax skips.
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
        finished = g.op.Where(below, vector, g.op.Where(here, target, column))
        # Finished rows are selected: a product of NaN with 0 would be NaN.
        changed = g.op.And(g.op.GreaterOrEqual(rows, j), g.op.Greater(columns, j))
        a = g.op.Where(changed, reflected, g.op.Where(g.op.Equal(columns, j), finished, a))
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
