"""Cholesky factors of dense matrices."""

from __future__ import annotations

import math

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import INT32, INT64
from onnxplug.converters.helpers.grids import batch_of, full, iota
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import dtype_of, take, transpose


def cholesky(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """``L`` with ``A = L L^T`` from A's lower triangle, a column a step (Golub & Van Loan, 4.2.4), and LAPACK's ``info``.

    L is NaN from the first leading minor that is not positive: torch raises an error there, or leaves the elements
    unspecified.
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
    lower, info = repeat(g, n, step, start, full(g, 0, INT64, batch_of(g, a)))
    return lower, g.cast(info, INT32)
