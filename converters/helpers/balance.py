"""Matrices balanced before their eigenvalues are computed (Parlett & Reinsch 1969; LAPACK's gebal).

Isolated eigenvalues, such as all eigenvalues of a triangular matrix, are set apart by a permutation and are exact; rows and
columns of very different size are scaled by powers of two, so that rounding is small relative to each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.grids import full, iota, on_diagonal
from onnxplug.converters.helpers.loops import repeat
from onnxplug.converters.helpers.matrices import dtype_of, rearranged, take
from onnxplug.converters.helpers.reductions import reduce

_SWEEPS = 20
#: A scaling must make the sum of both norms smaller by this factor.
_GAIN = 0.95
#: The largest power of two by which a row is scaled: two of them, and an element, must not overflow.
_REACH = {FLOAT: 30.0, DOUBLE: 250.0}


class Balanced(NamedTuple):
    """A balanced matrix, with the permutation and scales that undo it.

    Attributes:
        parts: The matrix: one part, or a real and an imaginary part, ``[*batch, n, n]``.
        order: The row of the original matrix that each row is, ``[*batch, n]``.
        scales: The divisors of rows and factors of columns, in the original order, ``[*batch, n]``.
    """

    parts: list[Value]
    order: Value
    scales: Value


def balanced(g: GraphBuilder, parts: Sequence[Value]) -> Balanced:
    """``P^T D^-1 A D P`` for a permutation P and powers of two D."""
    rank, n = rank_of(parts[0]), g.dim(parts[0], -1)
    sizes = [g.op.Abs(part) for part in parts]
    size = sizes[0] if len(sizes) == 1 else g.op.Add(*sizes)
    size = g.op.Where(on_diagonal(g, n, n), g.const(0.0, dtype_of(size)), size)
    keys, active = _set_apart(g, size)
    scales = _scales(g, size, active)
    across, down = unsqueeze(g, scales, rank - 2), unsqueeze(g, scales, rank - 1)
    _, order = g.op.TopK(keys, g.as_vector(n), axis=rank - 2, largest=0, sorted=1, _outputs=2)
    scaled = [g.op.Div(g.op.Mul(part, across), down) for part in parts]
    return Balanced([rearranged(g, rearranged(g, x, order, -2), order, -1) for x in scaled], order, scales)


def restored(g: GraphBuilder, x: Value, order: Value, scales: Value) -> Value:
    """Vectors (columns) of the balanced matrix as vectors of the original matrix."""
    rank, n = rank_of(x), g.dim(x, -2)
    _, inverse = g.op.TopK(order, g.as_vector(n), axis=rank - 2, largest=0, sorted=1, _outputs=2)
    return g.op.Mul(rearranged(g, x, inverse, -2), unsqueeze(g, scales, rank - 1))


def _set_apart(g: GraphBuilder, size: Value) -> tuple[Value, Value]:
    """Numbers by which rows are to be sorted, and which rows are not set apart: ``[*batch, n]`` each.

    A row that is 0 but for its diagonal goes to the end, a column to the beginning, until there is no more.
    """
    rank, n = rank_of(size), g.dim(size, -1)
    index = iota(g, n)
    filled = g.op.Not(g.op.Equal(size, g.const(0.0, dtype_of(size))))
    count = g.as_scalar(n)
    none = g.const(-1)

    def step(j: Value, keys: Value, axis: int, key: Value) -> list[Value]:
        active = g.op.And(g.op.GreaterOrEqual(keys, g.const(0)), g.op.Less(keys, count))
        others = g.op.And(filled, unsqueeze(g, active, axis - 1 if axis == rank - 1 else axis + 1))
        neighbours = reduce(g, "ReduceSum", g.cast(others, INT64), [axis], False)
        free = g.op.And(active, g.op.Equal(neighbours, g.const(0)))
        chosen = reduce(g, "ReduceMax", g.op.Where(free, index, none), [rank - 2], True)
        return [g.op.Where(g.op.Equal(index, chosen), key, keys)]

    def to_end(j: Value, keys: Value) -> list[Value]:
        return step(j, keys, rank - 1, g.op.Sub(g.op.Add(count, count), j))

    def to_start(j: Value, keys: Value) -> list[Value]:
        return step(j, keys, rank - 2, g.op.Sub(j, count))

    start = full(g, index, INT64, g.dims(size)[:-1])
    keys = repeat(g, n, to_start, repeat(g, n, to_end, start)[0])[0]
    return keys, g.op.And(g.op.GreaterOrEqual(keys, g.const(0)), g.op.Less(keys, count))


def _scales(g: GraphBuilder, size: Value, active: Value) -> Value:
    """Powers of two that make the norms of each active row and its column alike, ``[*batch, n]``."""
    dtype, rank, n = dtype_of(size), rank_of(size), g.dim(size, -1)
    zero, one, half = g.const(0.0, dtype), g.const(1.0, dtype), g.const(0.5, dtype)
    index = iota(g, n)
    both = g.op.And(unsqueeze(g, active, rank - 2), unsqueeze(g, active, rank - 1))
    size = g.op.Where(both, size, zero)
    reach = _REACH[dtype]

    def turn(k: Value, size: Value, powers: Value, changed: Value) -> list[Value]:
        column, row = (reduce(g, "ReduceSum", take(g, size, k, axis), [rank - 2], True) for axis in (-1, -2))
        usable = g.op.And(
            g.op.Greater(g.op.Min(column, row), zero), g.op.Less(g.op.Max(column, row), g.const(math.inf, dtype))
        )
        column, row = g.op.Where(usable, column, one), g.op.Where(usable, row, one)
        ratio = g.op.Mul(g.op.Sub(g.op.Log(row), g.op.Log(column)), g.const(0.5 / math.log(2), dtype))
        here = g.op.Equal(index, k)
        old = reduce(g, "ReduceSum", g.op.Where(here, powers, zero), [rank - 2], True)
        power = g.op.Clip(
            g.op.Add(old, g.op.Floor(g.op.Add(ratio, half))), g.const(-reach, dtype), g.const(reach, dtype)
        )
        power = g.op.Sub(power, old)
        factor = g.op.Pow(g.const(2.0, dtype), power)
        now = g.op.Add(g.op.Mul(column, factor), g.op.Div(row, factor))
        better = g.op.Less(now, g.op.Mul(g.op.Add(column, row), g.const(_GAIN, dtype)))
        better = g.op.And(better, usable)
        power, factor = g.op.Where(better, power, zero), g.op.Where(better, factor, one)
        wide = g.op.Where(here, factor, one)
        size = g.op.Div(g.op.Mul(size, unsqueeze(g, wide, rank - 2)), unsqueeze(g, wide, rank - 1))
        improved = reduce(g, "ReduceSum", g.cast(better, INT64), None, False)
        return [
            size,
            g.op.Add(powers, g.op.Where(here, power, zero)),
            g.op.Or(changed, g.op.Greater(improved, g.const(0))),
        ]

    def sweep(_: Value, size: Value, powers: Value) -> list[Value]:
        size, powers, changed = repeat(g, n, turn, size, powers, g.const(False))
        return [changed, size, powers]

    start = full(g, 0.0, dtype, g.dims(size)[:-1])
    powers = repeat(g, _SWEEPS, sweep, size, start, until=True)[1]
    return g.op.Pow(g.const(2.0, dtype), powers)
