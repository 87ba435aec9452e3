"""Eigenvalues and eigenvectors of general matrices."""

from __future__ import annotations

import math

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.balance import balanced, restored
from onnxplug.converters.helpers.complex_pairs import bilinear, c_abs, c_conj, c_div, c_mul, c_sub
from onnxplug.converters.helpers.grids import eye, full, iota, offset
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import dtype_of, epsilon, poison, scale_of, take, transpose
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.results import wanted
from onnxplug.converters.helpers.schur import Grid, band, block_of_two, grid_of, moved, parts_of, schur, stored
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def linalg_eig(g: GraphBuilder, node: FxNode) -> list[Complex | None]:
    """linalg_eig(Tensor self) -> (Tensor eigenvalues, Tensor eigenvectors)

    The vectors have length 1 and a real, positive largest element; LAPACK leaves the sign of vectors of real eigenvalues open.
    Eigenvalues come in the order in which the QR steps leave them on the diagonal, mostly LAPACK's.
    """
    return list(_eig(g, node.args[0], vectors=wanted(node, 1)))


def linalg_eigvals(g: GraphBuilder, node: FxNode) -> Complex:
    """linalg_eigvals(Tensor self) -> Tensor"""
    return _eig(g, node.args[0], vectors=False)[0]


def _where(g: GraphBuilder, condition: Value, x: Complex, y: Complex) -> Complex:
    return Complex(g.op.Where(condition, x.real, y.real), g.op.Where(condition, x.imag, y.imag))


def _eig(g: GraphBuilder, a: Value | Complex, *, vectors: bool) -> tuple[Complex, Complex | None]:
    """Eigenvalues ``[*batch, n]`` and eigenvectors ``[*batch, n, n]``; NaN of matrices that are not finite."""
    parts = [a.real, a.imag] if isinstance(a, Complex) else [a]
    parts, order, scales = balanced(g, parts)
    grid = grid_of(g, parts)
    x = stored(g, grid, parts)
    rank = rank_of(x)
    scale, spoilt = scale_of(g, x), poison(g, x)
    t, z, converged = schur(g, grid, g.op.Div(x, scale), vectors=vectors)
    spoilt = g.op.Where(unsqueeze(g, converged, rank - 1), spoilt, g.const(math.nan, dtype_of(x)))
    if grid.parts == 1:
        values, turn, second = _block_values(g, grid, t)
    else:
        values = Complex(*(band(g, grid, part, 0) for part in parts_of(g, grid, t)))
    flat = [squeeze(g, v, rank - 1) for v in (scale, spoilt)]
    result = Complex(*(g.op.Add(g.op.Mul(v, flat[0]), flat[1]) for v in (values.real, values.imag)))
    if z is None:
        return result, None
    real = None
    if grid.parts == 1:
        real = unsqueeze(g, g.op.Equal(values.imag, g.const(0.0, dtype_of(x))), rank - 2)
        triangular, basis = _turned(g, t, turn), Complex(g.op.MatMul(z, turn.real), g.op.MatMul(z, turn.imag))
    else:
        triangular, basis = Complex(*parts_of(g, grid, t)), Complex(*parts_of(g, grid, z))
    eigenvectors = bilinear(g, g.op.MatMul, basis, _triangular_vectors(g, grid, triangular, values))
    eigenvectors = Complex(*(restored(g, part, order, scales) for part in (eigenvectors.real, eigenvectors.imag)))
    eigenvectors = _normalised(g, eigenvectors, real)
    if real is not None:
        before = Complex(*(moved(g, grid, part, -1) for part in (eigenvectors.real, eigenvectors.imag)))
        second = g.op.And(unsqueeze(g, second, rank - 2), g.op.Not(real))
        eigenvectors = _where(g, second, c_conj(g, before), eigenvectors)
    return result, Complex(g.op.Add(eigenvectors.real, spoilt), g.op.Add(eigenvectors.imag, spoilt))


def _turned(g: GraphBuilder, t: Value, turn: Complex) -> Complex:
    """``U^H T U`` of a real T and a complex U."""
    right = Complex(g.op.MatMul(t, turn.real), g.op.MatMul(t, turn.imag))
    adjoint = Complex(transpose(g, turn.real), g.op.Neg(transpose(g, turn.imag)))
    return bilinear(g, g.op.MatMul, adjoint, right)


def _block_values(g: GraphBuilder, grid: Grid, t: Value) -> tuple[Complex, Complex, Value]:
    """Of a real T with blocks of two: eigenvalues, the unitary matrix that makes it triangular, and the blocks' second rows."""
    dtype = dtype_of(t)
    zero = g.const(0.0, dtype)
    a, b, c = (band(g, grid, t, above) for above in (0, 1, -1))
    d = moved(g, grid, a, 1)
    block = g.op.Not(g.op.Equal(c, zero))
    second = g.op.And(moved(g, grid, block, -1), g.op.Greater(grid.places, g.const(0)))
    pairs = block_of_two(g, a, b, c, d)
    # The block's eigenvalues less d; the first of them and c are an eigenvector.
    lead = Complex(g.op.Where(pairs.paired, pairs.mean, pairs.far), g.op.Where(pairs.paired, pairs.root, zero))
    other = Complex(g.op.Where(pairs.paired, pairs.mean, pairs.near), g.op.Neg(lead.imag))
    first = Complex(g.op.Add(d, lead.real), lead.imag)
    behind = Complex(*(moved(g, grid, v, -1) for v in (g.op.Add(d, other.real), other.imag)))
    values = _where(g, second, behind, _where(g, block, first, Complex(a, zero)))
    return values, _turn(g, grid, lead, c, block, second), second


def _turn(g: GraphBuilder, grid: Grid, lead: Complex, low: Value, block: Value, second: Value) -> Complex:
    """The unitary matrix with ``[[lead, -low], [low, conj(lead)]]``, divided by its length, at each block."""
    dtype = dtype_of(low)
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    top = g.op.Where(block, g.op.Max(g.op.Max(g.op.Abs(lead.real), lead.imag), g.op.Abs(low)), one)
    parts = [g.op.Div(v, top) for v in (lead.real, lead.imag, low)]
    length = g.op.Sqrt(g.op.Sum(*(g.op.Mul(v, v) for v in parts)))
    real, imag, low = (g.op.Div(v, g.op.Where(block, length, one)) for v in parts)
    last = rank_of(low)
    main = g.op.Where(second, moved(g, grid, real, -1), g.op.Where(block, real, one))
    main_imag = g.op.Where(second, g.op.Neg(moved(g, grid, imag, -1)), g.op.Where(block, imag, zero))
    low = g.op.Where(block, low, zero)
    main, main_imag, low = (unsqueeze(g, v, last - 1) for v in (main, main_imag, low))
    rows = unsqueeze(g, grid.places, 1)
    diagonal = g.op.Equal(rows, grid.places)
    under = g.op.Where(g.op.Equal(rows, g.op.Add(grid.places, g.const(1))), low, zero)
    turned = g.op.Sub(g.op.Add(g.op.Where(diagonal, main, zero), under), transpose(g, under))
    return Complex(turned, g.op.Where(diagonal, main_imag, zero))


def _triangular_vectors(g: GraphBuilder, grid: Grid, t: Complex, values: Complex) -> Complex:
    """The eigenvectors of upper triangular matrices, by substitution, a row of all of them a step.

    Differences of eigenvalues count as no less than rounding. Each vector is scaled as it grows, so that none overflows.
    """
    dtype = dtype_of(t.real)
    rank = rank_of(t.real)
    rows = unsqueeze(g, grid.places, 1)
    zero, one, eps = g.const(0.0, dtype), g.const(1.0, dtype), g.const(epsilon(dtype), dtype)
    across = Complex(*(unsqueeze(g, v, rank - 2) for v in (values.real, values.imag)))
    least = g.op.Mul(g.op.Max(g.op.Add(g.op.Abs(across.real), g.op.Abs(across.imag)), eps), eps)
    last = offset(g, grid.n, -1)

    def step(j: Value, real: Value, imag: Value) -> list[Value]:
        k = g.op.Sub(g.as_scalar(last), j)
        at = as_index(g, k)
        beyond = g.op.Greater(grid.places, k)
        row = Complex(*(g.op.Where(beyond, take(g, part, at, -2), zero) for part in (t.real, t.imag)))
        rest = bilinear(g, g.op.MatMul, row, Complex(real, imag))
        gap = c_sub(g, across, Complex(*(take(g, part, at, -1) for part in (across.real, across.imag))))
        close = g.op.Less(g.op.Add(g.op.Abs(gap.real), g.op.Abs(gap.imag)), least)
        solved = c_div(g, rest, _where(g, close, Complex(least, zero), gap))
        place = g.op.And(g.op.Equal(rows, k), beyond)
        x = _where(g, place, solved, Complex(real, imag))
        size = g.op.Max(g.op.Abs(x.real), g.op.Abs(x.imag))
        size = g.op.Max(reduce(g, "ReduceMax", size, [rank - 2], True), one)
        return [g.op.Div(x.real, size), g.op.Div(x.imag, size)]

    sizes = g.dims(t.real)
    start = full(g, eye(g, grid.n, grid.n, dtype), dtype, sizes)
    return Complex(*repeat(g, grid.n, step, start, full(g, 0.0, dtype, sizes)))


def _normalised(g: GraphBuilder, x: Complex, real: Value | None) -> Complex:
    """Columns of length 1 whose largest element is real and positive; columns in a mask ``[*batch, 1, n]`` are real."""
    axis = rank_of(x.real) - 2
    zero = g.const(0.0, dtype_of(x.real))
    at = g.op.ArgMax(g.op.Add(g.op.Mul(x.real, x.real), g.op.Mul(x.imag, x.imag)), axis=axis, keepdims=1)
    lead = Complex(*(g.op.GatherElements(part, at, axis=axis) for part in (x.real, x.imag)))
    size = c_abs(g, lead)
    turned = c_mul(g, x, Complex(g.op.Div(lead.real, size), g.op.Neg(g.op.Div(lead.imag, size))))
    largest = g.op.Equal(unsqueeze(g, iota(g, g.dim(x.real, -2)), 1), at)
    imag = g.op.Where(largest if real is None else g.op.Or(largest, real), zero, turned.imag)
    squares = g.op.Add(g.op.Mul(turned.real, turned.real), g.op.Mul(imag, imag))
    length = g.op.Sqrt(reduce(g, "ReduceSum", squares, [axis], True))
    return Complex(g.op.Div(turned.real, length), g.op.Div(imag, length))


RULES: list[Rule] = [
    complex_rule("linalg_eig.default", linalg_eig),
    complex_rule("linalg_eigvals.default", linalg_eigvals),
    complex_rule("_linalg_eigvals.default", linalg_eigvals),
]
