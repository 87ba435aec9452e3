"""Singular values and symmetric eigenvalues by Jacobi rotations of columns (Hestenes; Golub & Van Loan, 8.5, 8.6.3).

Each step of a sweep rotates n/2 disjoint pairs of columns of every matrix of the batch at once; after a step the columns
move on as in a round-robin tournament (Brent & Luk), so that n - 1 steps meet all pairs and bring the columns home.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import FLOAT
from onnxplug.converters.helpers.grids import batch_of, eye, full, iota, offset
from onnxplug.converters.helpers.loops import repeat
from onnxplug.converters.helpers.matrices import (
    cut,
    diagonal,
    dtype_of,
    epsilon,
    poison,
    rearranged,
    scale_of,
    take,
    transpose,
)
from onnxplug.converters.helpers.qr import householder, orthogonal
from onnxplug.converters.helpers.reductions import reduce

#: Convergence is quadratic in the end: 6 to 10 sweeps do for hundreds of columns.
_SWEEPS = 40
#: Two columns are orthogonal when their product is below this many epsilons of the product of their lengths.
_ORTHOGONAL = 32.0


class Svd(NamedTuple):
    """``A = U diag(S) Vh``; U and Vh are ``None`` when only the singular values are computed."""

    u: Value | None
    s: Value
    vh: Value | None


def rotated(g: GraphBuilder, a: Value, *, symmetric: bool) -> tuple[Value, Value]:
    """``A V`` and V, for the orthogonal V that makes the columns of ``A V`` orthogonal to each other.

    For a symmetric A, for the V that makes ``V^T A V`` diagonal: the same rotations of the same columns (``A V`` turns as V
    does), their angles those of the classical, two-sided method.

    A's largest element is about 1. After each sweep V is brought back to orthogonality by a Newton-Schulz step (Higham,
    Functions of Matrices, 8.3), and ``A V`` computed anew: the rounding errors of one sweep's rotations are not carried
    into the next, and the last sweep hardly rotates.
    """
    dtype = dtype_of(a)
    rank = rank_of(a)
    m, n = g.dim(a, -2), g.dim(a, -1)
    pad, half = _halves(g, n)
    order = _tournament(g, half)
    steps = offset(g, offset(g, half, half), -1)
    blank = full(g, 0.0, dtype, [*batch_of(g, a), offset(g, m, n), pad])

    def turn(j: Value, x: Value, busy: Value) -> list[Value]:
        first, second = cut(g, x, -1, 0, half), cut(g, x, -1, half)
        p, q = cut(g, first, -2, 0, m), cut(g, second, -2, 0, m)
        r, s = (cut(g, first, -2, m), cut(g, second, -2, m)) if symmetric else (p, q)
        a_, b_, d_ = (reduce(g, "ReduceSum", g.op.Mul(y, z), [rank - 2], True) for y, z in ((p, r), (q, s), (q, r)))
        tangent = _tangent(g, a_, b_, d_)
        skewed = _skewed(g, a_, b_, d_, symmetric)
        root = g.op.Sqrt(g.op.Add(g.op.Mul(tangent, tangent), g.const(1.0, dtype)))
        sine = g.op.Div(tangent, root)
        # With the tangent of half the angle, the term added is as small as the angle, and so is its rounding error.
        quarter = g.op.Div(tangent, g.op.Add(root, g.const(1.0, dtype)))
        rotation = g.op.Concat(
            g.op.Sub(first, g.op.Mul(sine, g.op.Add(second, g.op.Mul(quarter, first)))),
            g.op.Add(second, g.op.Mul(sine, g.op.Sub(first, g.op.Mul(quarter, second)))),
            axis=rank - 1,
        )
        return [take(g, rotation, order, -1), g.op.Or(busy, skewed)]

    def sweep(j: Value, w: Value, v: Value) -> list[Value]:
        both = g.op.Concat(g.op.Concat(w, v, axis=rank - 2), blank, axis=rank - 1)
        both, busy = repeat(g, steps, turn, both, g.const(False))
        v = cut(g, cut(g, both, -2, m), -1, 0, n)
        gram = g.op.MatMul(transpose(g, v), v)
        v = g.op.Sub(g.op.Mul(g.const(1.5, dtype), v), g.op.Mul(g.const(0.5, dtype), g.op.MatMul(v, gram)))
        return [busy, g.op.MatMul(a, v), v]

    identity = full(g, eye(g, n, n, dtype), dtype, [*batch_of(g, a), n, n])
    w, v = repeat(g, _SWEEPS, sweep, a, identity, until=True)
    return w, v


def _tangent(g: GraphBuilder, a: Value, b: Value, d: Value) -> Value:
    """The tangent of the rotation that makes ``[[a, d], [d, b]]`` diagonal: the smaller root of t^2 + t (b - a) / d - 1."""
    zero = g.const(0.0, dtype_of(a))
    gap, twice = g.op.Sub(b, a), g.op.Add(d, d)
    # Without a quotient that overflows.
    below = g.op.Add(g.op.Abs(gap), g.op.Sqrt(g.op.Add(g.op.Mul(gap, gap), g.op.Mul(twice, twice))))
    tangent = g.op.Div(g.op.Where(g.op.Less(gap, zero), g.op.Neg(twice), twice), below)
    return g.op.Where(g.op.Greater(below, zero), tangent, zero)


def _skewed(g: GraphBuilder, a: Value, b: Value, d: Value, symmetric: bool) -> Value:
    """Whether any d is more than the rounding error of matrices with these diagonal elements; no for NaN.

    The bound is relative to the matrix's largest element: smaller remainders of products are not known.
    """
    dtype = dtype_of(a)
    longer = g.op.Max(g.op.Abs(a), g.op.Abs(b))
    top = reduce(g, "ReduceMax", longer, [rank_of(a) - 1], True)
    size = top if symmetric else g.op.Sqrt(g.op.Mul(longer, top))
    bound = g.op.Mul(g.const(_ORTHOGONAL * epsilon(dtype), dtype), size)
    exceeds = g.cast(g.op.Greater(g.op.Abs(d), bound), FLOAT)
    return g.op.Greater(reduce(g, "ReduceSum", exceeds, None, False), g.const(0.0))


def _halves(g: GraphBuilder, n: Size) -> tuple[Size, Size]:
    """The number of columns of zeros that make n even, and half of the even number."""
    if isinstance(n, int):
        return n % 2, (n + 1) // 2
    pad = g.op.Mod(n, g.const(2))
    return pad, g.op.Div(g.op.Add(n, pad), g.const(2))


def _tournament(g: GraphBuilder, half: Size) -> Value:
    """The place of each column's successor: the first stays, the others move round it by one place."""
    if isinstance(half, int):
        seats = np.arange(2 * half)
        top = np.where(seats == 1, half, seats - 1)
        bottom = np.where(seats == 2 * half - 1, max(half - 1, 1), seats + 1)
        return g.const(np.where(seats == 0, 0, np.where(seats < half, top, bottom)))
    seats_ = iota(g, offset(g, half, half))
    one = g.const(1)
    top_ = g.op.Where(g.op.Equal(seats_, one), half, g.op.Sub(seats_, one))
    end = g.op.Equal(seats_, g.op.Sub(g.op.Add(half, half), one))
    bottom_ = g.op.Where(end, g.op.Max(g.op.Sub(half, one), one), g.op.Add(seats_, one))
    moved = g.op.Where(g.op.Less(seats_, half), top_, bottom_)
    return g.op.Where(g.op.Equal(seats_, g.const(0)), seats_, moved)


def svd(g: GraphBuilder, a: Value, *, vectors: bool = True, complete: bool = False) -> Svd:
    """Singular values in descending order, and the vectors; all of U's and Vh's when ``complete``.

    A matrix that is not finite gives NaN (torch raises). The signs of the vectors are arbitrary, and so is the basis
    that belongs to a repeated or zero singular value.
    """
    m, n = g.dim(a, -2), g.dim(a, -1)
    if isinstance(m, int) and isinstance(n, int):
        if m >= n:
            return _tall_svd(g, a, vectors, complete)
        u, s, vh = _tall_svd(g, transpose(g, a), vectors, complete)
        return Svd(u, s, vh) if u is None or vh is None else Svd(transpose(g, vh), s, transpose(g, u))
    tall = g.op.GreaterOrEqual(g.as_scalar(m), g.as_scalar(n))
    flipped = _either(g, tall, a, transpose(g, a))
    u, s, vh = _tall_svd(g, flipped, vectors, complete)
    if u is None or vh is None:
        return Svd(u, s, vh)
    return Svd(_either(g, tall, u, transpose(g, vh)), s, _either(g, tall, vh, transpose(g, u)))


def _either(g: GraphBuilder, condition: Value, one: Value, other: Value) -> Value:
    """One of two values of different sizes."""
    branches = [g.subgraph(lambda value=value: value, name="which") for value in (one, other)]
    result = g.op.If(condition, then_branch=branches[0], else_branch=branches[1])
    result.type = one.type
    result.shape = ir.Shape([*batch_dims(one), None, None])
    return result


def batch_dims(x: Value) -> list[int | ir.SymbolicDim | None]:
    """The known dimensions before the last two."""
    return list(x.shape.dims[:-2]) if x.shape is not None else []


def _tall_svd(g: GraphBuilder, a: Value, vectors: bool, complete: bool) -> Svd:
    """SVD of ``[*batch, m, n]`` with m >= n.

    The orthogonal columns W = A V are U S. U comes from a QR of W, its columns in descending order: R is diagonal, but
    for signs, and Q is orthogonal also where W is 0.
    """
    dtype = dtype_of(a)
    rank = rank_of(a)
    m, n = g.dim(a, -2), g.dim(a, -1)
    scale = scale_of(g, a)
    spoilt = poison(g, a)
    columns, v = rotated(g, g.op.Div(a, scale), symmetric=False)
    sizes = g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(columns, columns), [rank - 2], False))
    sizes, order = g.op.TopK(sizes, g.as_vector(n), axis=rank - 2, largest=1, sorted=1, _outputs=2)
    flat = [g.op.Squeeze(x, g.const(np.array([rank - 1]))) for x in (scale, spoilt)]
    s = g.op.Add(g.op.Mul(sizes, flat[0]), flat[1])
    if not vectors:
        return Svd(None, s, None)
    packed, tau = householder(g, rearranged(g, columns, order, -1))
    q = orthogonal(g, packed, tau, m if complete else n)
    negative = g.op.Less(diagonal(g, packed), g.const(0.0, dtype))
    signs = g.op.Where(negative, g.const(-1.0, dtype), g.const(1.0, dtype))
    if complete:
        rest = full(g, 1.0, dtype, [*batch_of(g, a), offset(g, m, _negative(g, n))])
        signs = g.op.Concat(signs, rest, axis=rank - 2)
    u = g.op.Add(g.op.Mul(q, unsqueeze(g, signs, rank - 2)), spoilt)
    return Svd(u, s, g.op.Add(transpose(g, rearranged(g, v, order, -1)), spoilt))


def _negative(g: GraphBuilder, n: Size) -> Size:
    return -n if isinstance(n, int) else g.op.Neg(n)


def eigh(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """Eigenvalues in ascending order and eigenvectors of a symmetric matrix.

    The eigenvalues are the Rayleigh quotients of the vectors, whose error is of second order in theirs.
    """
    rank = rank_of(a)
    scale, spoilt = scale_of(g, a), poison(g, a)
    products, vectors = rotated(g, g.op.Div(a, scale), symmetric=True)
    quotients = reduce(g, "ReduceSum", g.op.Mul(vectors, products), [rank - 2], False)
    values, order = g.op.TopK(quotients, g.as_vector(g.dim(a, -1)), axis=rank - 2, largest=0, sorted=1, _outputs=2)
    flat = [g.op.Squeeze(x, g.const(np.array([rank - 1]))) for x in (scale, spoilt)]
    values = g.op.Add(g.op.Mul(values, flat[0]), flat[1])
    return values, g.op.Add(rearranged(g, vectors, order, -1), spoilt)
