"""Parts and properties of stacks of dense real matrices ``[*batch, m, n]``.

These helpers, and the helpers of the factorizations, work on a whole batch at once, by operators that take any number of leading
dimensions, so that the batch and the sizes may be dynamic or 0. Elements that must not count are masked by Where: a
product with 0 would keep NaN and turn infinities into NaN.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.grids import full, iota, on_diagonal, smaller
from onnxplug.converters.helpers.reductions import reduce

_EPSILON = {DOUBLE: 2.0**-52, FLOAT: 2.0**-23}


def dtype_of(x: Value) -> ir.DataType:
    """The dtype of a value, which is known."""
    assert x.dtype is not None
    return x.dtype


def epsilon(dtype: ir.DataType) -> float:
    """The spacing of numbers at 1, as ``torch.finfo(dtype).eps``."""
    return _EPSILON[dtype]


def transpose(g: GraphBuilder, x: Value) -> Value:
    """The last two axes swapped."""
    rank = rank_of(x)
    return g.op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def product_along(g: GraphBuilder, x: Value, axis: int, matrix: Value) -> Value:
    """The product of a matrix [size, out] with every vector along an axis, whose size becomes ``out``."""
    rank = rank_of(x)
    order = [a for a in range(rank) if a != axis] + [axis]
    product = g.op.MatMul(g.op.Transpose(x, perm=order), matrix)
    return g.op.Transpose(product, perm=[order.index(a) for a in range(rank)])


def take(g: GraphBuilder, x: Value, index: Value, axis: int) -> Value:
    """``x`` at an index along an axis: a 0-dim index removes the axis, an index of shape [1] keeps it."""
    return g.op.Gather(x, index, axis=axis % rank_of(x))


def cut(g: GraphBuilder, x: Value, axis: int, start: Size, stop: Size | None = None) -> Value:
    """``x[start:stop]`` along an axis."""
    end = g.const(np.array([np.iinfo(np.int64).max])) if stop is None else g.as_vector(stop)
    return g.op.Slice(x, g.as_vector(start), end, g.const(np.array([axis % rank_of(x)])))


def triangle(g: GraphBuilder, x: Value, *, upper: bool, diagonal: float | None = None, strict: bool = False) -> Value:
    """One triangle of each matrix, zeros elsewhere; ``diagonal`` replaces the diagonal."""
    dtype = dtype_of(x)
    rows, columns = unsqueeze(g, iota(g, g.dim(x, -2)), 1), unsqueeze(g, iota(g, g.dim(x, -1)), 0)
    less, more = (rows, columns) if upper else (columns, rows)
    compare = g.op.Less if strict or diagonal is not None else g.op.LessOrEqual
    outside = g.const(0.0, dtype)
    if diagonal is not None:
        outside = g.op.Where(g.op.Equal(rows, columns), g.const(diagonal, dtype), outside)
    return g.op.Where(compare(less, more), x, outside)


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
    index = full(g, unsqueeze(g, order, rank - 1 if axis == -2 else rank - 2), INT64, sizes)
    return g.op.GatherElements(x, index, axis=axis % rank)


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
    return g.op.Pow(g.const(2.0, dtype), exponent)


def poison(g: GraphBuilder, x: Value) -> Value:
    """0 for a finite matrix, NaN for a matrix that holds NaN or an infinity: ``[*batch, 1, 1]``, to be added to results."""
    rank = rank_of(x)
    return reduce(g, "ReduceSum", g.op.Mul(x, g.const(0.0, dtype_of(x))), [rank - 2, rank - 1], True)
