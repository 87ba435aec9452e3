"""Singular values and symmetric eigenvalues by one-sided Jacobi rotations (Hestenes; Golub & Van Loan, 8.6.3).

Each step of a sweep rotates n/2 disjoint pairs of columns of every matrix of the batch at once; after a step the columns
move on as in a round-robin tournament (Brent & Luk), so that n - 1 steps meet all pairs and bring the columns home.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.shapes import Size
from onnxplug.converters._axes import rank_of, reduce, unsqueeze
from onnxplug.converters._matrix import (
    batch_of,
    cut,
    diagonal,
    dtype_of,
    epsilon,
    eye,
    full,
    householder,
    iota,
    largest,
    offset,
    orthogonal,
    poison,
    rearranged,
    repeat,
    scale_of,
    take,
    transpose,
)

#: Convergence is quadratic in the end: 6 to 10 sweeps do for hundreds of columns.
_SWEEPS = 40
#: A pair of columns is orthogonal when the cosine between them is below this many epsilons.
_ORTHOGONAL = 32.0
#: A column this many epsilons of the largest is rounding error: it keeps no sweep going.
_NEGLIGIBLE = 4.0


class Svd(NamedTuple):
    """``A = U diag(S) Vh``; U and Vh are ``None`` when only the singular values are computed."""

    u: Value | None
    s: Value
    vh: Value | None


def orthogonalize(g: GraphBuilder, x: Value, m: Size) -> Value:
    """``X V`` for the rotations V that make the columns of X's first m rows orthogonal to each other.

    With the identity below those m rows, V itself comes out below them.
    """
    dtype = dtype_of(x)
    n = g.dim(x, -1)
    pad, half = _halves(g, n)
    x = g.op.Concat(x, full(g, 0.0, dtype, [*g.dims(x)[:-1], pad]), axis=rank_of(x) - 1)
    order = _tournament(g, half)
    steps = offset(g, offset(g, half, half), -1)
    zero = g.const(0.0, dtype)
    rank = rank_of(x)

    def step(j: Value, x: Value, busy: Value) -> list[Value]:
        first, second = cut(g, x, -1, 0, half), cut(g, x, -1, half)
        p, q = cut(g, first, -2, 0, m), cut(g, second, -2, 0, m)
        a, b, d = (reduce(g, "ReduceSum", g.op.Mul(y, z), [rank - 2], True) for y, z in ((p, p), (q, q), (p, q)))
        # The smaller root t of t^2 + t (b - a) / d - 1, without a quotient that overflows.
        gap, twice = g.op.Sub(b, a), g.op.Add(d, d)
        below = g.op.Add(g.op.Abs(gap), g.op.Sqrt(g.op.Add(g.op.Mul(gap, gap), g.op.Mul(twice, twice))))
        tangent = g.op.Div(g.op.Where(g.op.Less(gap, zero), g.op.Neg(twice), twice), below)
        tangent = g.op.Where(g.op.Greater(below, zero), tangent, zero)
        cosine = g.op.Reciprocal(g.op.Sqrt(g.op.Add(g.op.Mul(tangent, tangent), g.const(1.0, dtype))))
        sine = g.op.Mul(cosine, tangent)
        turned = g.op.Concat(
            g.op.Sub(g.op.Mul(cosine, first), g.op.Mul(sine, second)),
            g.op.Add(g.op.Mul(sine, first), g.op.Mul(cosine, second)),
            axis=rank - 1,
        )
        return [take(g, turned, order, -1), g.op.Or(busy, _skewed(g, a, b, d))]

    def sweep(j: Value, x: Value) -> list[Value]:
        turned, busy = repeat(g, steps, step, x, g.const(False))
        return [busy, turned]

    turned = repeat(g, _SWEEPS, sweep, x, until=True)[0]
    return cut(g, turned, -1, 0, n)


def _skewed(g: GraphBuilder, a: Value, b: Value, d: Value) -> Value:
    """Whether any pair of columns with these squares and products is not yet orthogonal; NaN says no."""
    dtype = dtype_of(a)
    eps = epsilon(dtype)
    skew = g.op.Greater(g.op.Abs(d), g.op.Mul(g.const(_ORTHOGONAL * eps, dtype), g.op.Mul(g.op.Sqrt(a), g.op.Sqrt(b))))
    # Columns are scaled to about 1: what is left of a rank-deficient matrix is rounding error of that size.
    real = g.op.Greater(g.op.Min(a, b), g.const((_NEGLIGIBLE * eps) ** 2, dtype))
    count = reduce(g, "ReduceSum", g.cast(g.op.And(skew, real), ir.DataType.FLOAT), None, False)
    result: Value = g.op.Greater(count, g.const(0.0))
    return result


def _halves(g: GraphBuilder, n: Size) -> tuple[Size, Size]:
    """The number of columns of zeros that make n even, and half of the even number."""
    if isinstance(n, int):
        return n % 2, (n + 1) // 2
    pad = g.op.Mod(n, g.const(2))
    return pad, g.op.Div(g.op.Add(n, pad), g.const(2))


def _tournament(g: GraphBuilder, half: Size) -> Value:
    """Where each column's successor stands: the first stays, the others move round it by one place."""
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
    result: Value = g.op.Where(g.op.Equal(seats_, g.const(0)), seats_, moved)
    return result


def svd(g: GraphBuilder, a: Value, *, vectors: bool = True, complete: bool = False) -> Svd:
    """Singular values in descending order, and the vectors; all of U's and Vh's when ``complete``.

    A matrix that is not finite gives NaN (torch raises). Signs of the vectors are free, and so is the basis of the space
    that a repeated or zero singular value leaves.
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
    result: Value = g.op.If(condition, then_branch=branches[0], else_branch=branches[1])
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
    work = g.op.Div(a, scale)
    if vectors:
        identity = full(g, eye(g, n, n, dtype), dtype, [*batch_of(g, a), n, n])
        work = g.op.Concat(work, identity, axis=rank - 2)
    work = orthogonalize(g, work, m)
    columns = cut(g, work, -2, 0, m) if vectors else work
    sizes = g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(columns, columns), [rank - 2], False))
    sizes, order = g.op.TopK(sizes, g.as_vector(n), axis=rank - 2, largest=1, sorted=1, _outputs=2)
    flat = [g.op.Squeeze(x, g.const(np.array([rank - 1]))) for x in (scale, spoilt)]
    s = g.op.Add(g.op.Mul(sizes, flat[0]), flat[1])
    if not vectors:
        return Svd(None, s, None)
    work = rearranged(g, work, order, -1)
    packed, tau = householder(g, cut(g, work, -2, 0, m))
    q = orthogonal(g, packed, tau, m if complete else n)
    negative = g.op.Less(diagonal(g, packed), g.const(0.0, dtype))
    signs = g.op.Where(negative, g.const(-1.0, dtype), g.const(1.0, dtype))
    if complete:
        rest = full(g, 1.0, dtype, [*batch_of(g, a), offset(g, m, _negative(g, n))])
        signs = g.op.Concat(signs, rest, axis=rank - 2)
    u = g.op.Add(g.op.Mul(q, unsqueeze(g, signs, rank - 2)), spoilt)
    return Svd(u, s, g.op.Add(transpose(g, cut(g, work, -2, m)), spoilt))


def _negative(g: GraphBuilder, n: Size) -> Size:
    return -n if isinstance(n, int) else g.op.Neg(n)


def eigh(g: GraphBuilder, a: Value) -> tuple[Value, Value]:
    """Eigenvalues in ascending order and eigenvectors of a symmetric matrix.

    Shifted to be positive definite, it has its eigenvectors for right singular vectors; the eigenvalues are the Rayleigh
    quotients of these, whose error is of second order in theirs.
    """
    dtype = dtype_of(a)
    rank = rank_of(a)
    n = g.dim(a, -1)
    scale, spoilt = scale_of(g, a), poison(g, a)
    work = g.op.Div(a, scale)
    sums = reduce(g, "ReduceSum", g.op.Abs(work), [rank - 2], True)
    shift = g.op.Mul(g.const(1.25, dtype), reduce(g, "ReduceMax", sums, [rank - 1], True))
    identity = full(g, eye(g, n, n, dtype), dtype, g.dims(a))
    positive = g.op.Add(work, g.op.Mul(shift, identity))
    # Scaled to about 1 again, as the test for convergence expects.
    size = largest(g, positive)
    positive = g.op.Div(positive, g.op.Where(g.op.Greater(size, g.const(0.0, dtype)), size, g.const(1.0, dtype)))
    turned = orthogonalize(g, g.op.Concat(positive, identity, axis=rank - 2), n)
    vectors = cut(g, turned, -2, n)
    quotients = reduce(g, "ReduceSum", g.op.Mul(vectors, g.op.MatMul(work, vectors)), [rank - 2], False)
    values, order = g.op.TopK(quotients, g.as_vector(n), axis=rank - 2, largest=0, sorted=1, _outputs=2)
    flat = [g.op.Squeeze(x, g.const(np.array([rank - 1]))) for x in (scale, spoilt)]
    values = g.op.Add(g.op.Mul(values, flat[0]), flat[1])
    return values, g.op.Add(rearranged(g, vectors, order, -1), spoilt)
