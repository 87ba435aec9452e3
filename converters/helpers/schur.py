"""Schur forms of dense matrices, by Householder reflections and shifted QR steps (Golub & Van Loan, 7.4 and 7.5).

A complex matrix is held as a real matrix of twice the size, with ``[[a, -b], [b, a]]`` instead of ``a + bi``, so that real and
complex matrices go through the same products; a *number* is the list of its parts, one for a real matrix and two for a complex
matrix. Each step works on the whole batch; the rows that it changes differ from matrix to matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.complex_functions import c_sqrt
from onnxplug.converters.helpers.complex_pairs import c_add, c_div, c_mul, c_scale, c_sub
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.grids import batch_of, eye, full, iota, offset
from onnxplug.converters.helpers.loops import as_index, repeat
from onnxplug.converters.helpers.matrices import dtype_of, epsilon, take, transpose
from onnxplug.converters.helpers.reductions import reduce

Number = list[Value]
#: QR steps for each eigenvalue, and for each matrix; LAPACK gives up after as many.
_STEPS, _LEAST_STEPS = 30, 300
#: After this number of steps without a result comes a step with another shift, made with LAPACK's factors.
_PATIENCE, _SHIFT, _SPREAD = 10, 0.75, math.sqrt(0.4375)


class Grid(NamedTuple):
    """The indices of a stack of matrices that the steps compare with.

    Attributes:
        parts: 1 for real matrices, 2 for complex matrices.
        n: Size of the matrices.
        places: The numbers of the rows, ``[n]``.
        rows, columns: The row ``[parts * n, 1]`` and column ``[parts * n]`` that each stored row and column belongs to.
        units: Which stored rows hold a part, as numbers ``[parts * n, 1]``, for each part.
    """

    parts: int
    n: Size
    places: Value
    rows: Value
    columns: Value
    units: list[Value]


def grid_of(g: GraphBuilder, a: Number) -> Grid:
    """The grid of a matrix that is given by its parts."""
    n, dtype = g.dim(a[0], -1), dtype_of(a[0])
    index = iota(g, n)
    if len(a) == 1:
        return Grid(1, n, index, unsqueeze(g, index, 1), index, [g.const(np.ones((1, 1)), dtype)])
    places = iota(g, offset(g, n, n))
    columns = g.op.Div(places, g.const(2))
    odd = g.cast(unsqueeze(g, g.op.Sub(places, g.op.Mul(columns, g.const(2))), 1), dtype)
    return Grid(2, n, index, unsqueeze(g, columns, 1), columns, [g.op.Sub(g.const(1.0, dtype), odd), odd])


def _times_i(g: GraphBuilder, grid: Grid, x: Value) -> Value:
    """Stored columns times i: ``-b`` and ``a`` in the places of ``a`` and ``b``."""
    even, odd = grid.units
    partner = g.op.Add(iota(g, offset(g, grid.n, grid.n)), g.cast(squeeze(g, g.op.Sub(even, odd), 1), INT64))
    return g.op.Mul(take(g, x, partner, -2), g.op.Sub(odd, even))


def stored(g: GraphBuilder, grid: Grid, a: Number) -> Value:
    """A matrix of its parts, ``[*batch, n, n]`` each, in the form that is computed with."""
    if grid.parts == 1:
        return a[0]
    first = g.op.Add(*(g.op.Mul(take(g, p, grid.columns, -2), unit) for p, unit in zip(a, grid.units, strict=True)))
    even = g.cast(squeeze(g, grid.units[0], 1), BOOL)
    return g.op.Where(even, *(take(g, x, grid.columns, -1) for x in (first, _times_i(g, grid, first))))


def parts_of(g: GraphBuilder, grid: Grid, x: Value) -> Number:
    """The parts of a matrix, ``[*batch, n, n]`` each."""
    if grid.parts == 1:
        return [x]
    rank = rank_of(x)
    end = g.const([np.iinfo(np.int64).max] * 2)
    axes, steps = g.const([rank - 2, rank - 1]), g.const([2, 2])
    return [g.op.Slice(x, g.const([part, 0]), end, axes, steps) for part in range(2)]


def band(g: GraphBuilder, grid: Grid, x: Value, above: int) -> Value:
    """The elements ``x[k, k + above]`` of each matrix ``[*batch, n, n]``, for ``above`` 0 or 1 by row, for -1 by column; 0 where
    there is none."""
    rows = unsqueeze(g, grid.places, 1)
    place = g.op.Equal(g.op.Add(rows, g.const(above)) if above else rows, grid.places)
    picked = g.op.Where(place, x, g.const(0.0, dtype_of(x)))
    return reduce(g, "ReduceSum", picked, [rank_of(x) - (1 if above > 0 else 2)], False)


def moved(g: GraphBuilder, grid: Grid, x: Value, by: int) -> Value:
    """``x[..., k + by]`` for a list by row ``[*batch, n]``; the ends are repeated."""
    index = g.op.Add(grid.places, g.const(by))
    last = g.op.Sub(g.as_scalar(grid.n), g.const(1))
    return take(g, x, g.op.Max(g.op.Min(index, last), g.const(0)), -1)


def _reflected(g: GraphBuilder, grid: Grid, column: Value, head: Value, states: Sequence[Value]) -> list[Value]:
    """``H x H``, and ``z H``, for the reflection that leaves of a column only the number in the row ``head``.

    Args:
        g: The builder.
        grid: Of the matrices.
        column: The first stored column of each matrix's numbers, ``[*batch, parts * n, 1]``; 0 in the rows that do not change.
        head: A mask of the row, ``[parts * n, 1]``.
        states: x, and z where it is wanted.
    """
    x, dtype, rank = states[0], dtype_of(states[0]), rank_of(states[0])
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    top = reduce(g, "ReduceMax", g.op.Abs(column), [rank - 2, rank - 1], True)
    # Scaled, so that the squares neither overflow nor vanish.
    column = g.op.Div(column, g.op.Where(g.op.Greater(top, zero), top, one))
    squares = g.op.Mul(column, column)
    masked = g.op.Where(head, squares, zero), g.op.Where(head, zero, squares)
    at_head, below = (reduce(g, "ReduceSum", part, [rank - 2], True) for part in masked)
    # The square of a much smaller number has lost its digits; such a head counts as 0.
    known = g.op.Greater(at_head, g.const(epsilon(dtype) ** 4, dtype))
    at_head = g.op.Where(known, at_head, zero)
    size, norm = g.op.Sqrt(at_head), g.op.Sqrt(g.op.Add(at_head, below))
    stretched = g.op.Mul(column, g.op.Add(one, g.op.Div(norm, g.op.Where(known, size, one))))
    v = g.op.Where(head, g.op.Where(known, stretched, g.op.Mul(grid.units[0], norm)), column)
    if grid.parts == 2:
        v = g.op.Where(g.const([True, False]), v, _times_i(g, grid, v))
    # A column that is 0 already, or NaN, is left alone.
    needed = g.op.Greater(below, zero)
    divisor = g.op.Where(needed, g.op.Mul(norm, g.op.Add(norm, size)), one)
    flat = transpose(g, g.op.Where(needed, g.op.Div(v, divisor), zero))
    x = g.op.Sub(x, g.op.MatMul(v, g.op.MatMul(flat, x)))
    return [g.op.Sub(y, g.op.MatMul(g.op.MatMul(y, v), flat)) for y in (x, *states[1:])]


def _column(g: GraphBuilder, grid: Grid, x: Value, k: Value) -> Value:
    """The first stored column of the column k (0-dim), ``[*batch, parts * n, 1]``."""
    return take(g, x, as_index(g, g.op.Mul(k, g.const(grid.parts))), -1)


def _hessenberg(g: GraphBuilder, grid: Grid, states: list[Value]) -> list[Value]:
    """The states of :func:`_reflected` with an x that is 0 below its first subdiagonal, but for rounding."""
    zero = g.const(0.0, dtype_of(states[0]))

    def step(j: Value, *inner: Value) -> list[Value]:
        below = g.op.Where(g.op.Greater(grid.rows, j), _column(g, grid, inner[0], j), zero)
        return _reflected(g, grid, below, g.op.Equal(grid.rows, g.op.Add(j, g.const(1))), inner)

    return repeat(g, offset(g, grid.n, -2), step, *states)


class _Bands(NamedTuple):
    """Three diagonals: ``x[k, k]``, ``x[k, k + 1]`` and ``x[k + 1, k]``, ``[*batch, n]`` for each part."""

    main: Number
    upper: Number
    lower: Number


def _cleaned(g: GraphBuilder, grid: Grid, x: Value) -> tuple[Value, _Bands, Value]:
    """A Hessenberg matrix without negligible elements, its diagonals, and the mask of its remaining subdiagonal, ``[*batch, n]``.

    An element is negligible relative to the two diagonal elements next to it; the matrix's largest element is about 1.
    """
    dtype = dtype_of(x)
    parts = parts_of(g, grid, x)
    if grid.parts == 2:
        x = stored(g, grid, parts)
    main, upper, lower = ([band(g, grid, part, above) for part in parts] for above in (0, 1, -1))
    eps = epsilon(dtype)
    neighbours = _size(g, main)
    neighbours = g.op.Max(g.op.Add(neighbours, moved(g, grid, neighbours, 1)), g.const(eps, dtype))
    edges = g.op.Greater(_size(g, lower), g.op.Mul(neighbours, g.const(eps, dtype)))
    kept = unsqueeze(g, take(g, edges, grid.columns, -1), rank_of(edges) - 1)
    kept = g.op.And(kept, g.op.Equal(grid.rows, g.op.Add(grid.columns, g.const(1))))
    kept = g.op.Or(kept, g.op.LessOrEqual(grid.rows, grid.columns))
    return g.op.Where(kept, x, g.const(0.0, dtype)), _Bands(main, upper, lower), edges


def _size(g: GraphBuilder, x: Number) -> Value:
    """The sum of the parts' absolute values."""
    sizes = [g.op.Abs(part) for part in x]
    return sizes[0] if len(sizes) == 1 else g.op.Add(*sizes)


def _window(g: GraphBuilder, grid: Grid, edges: Value) -> tuple[Value, Value]:
    """The first and last row of the last block that is not finished, ``[*batch, 1]`` each; the last is -1 where there is none.

    A block of two is finished, if it is real.
    """
    axis = rank_of(edges) - 1
    none = full(g, 0, INT64, [*g.dims(edges)[:-1], 1])
    long = edges if grid.parts == 2 else g.op.And(edges, moved(g, grid, edges, 1))
    span = 3 - grid.parts

    def last(where: Value, by: int) -> Value:
        """The last k with a property, plus ``by``; 0 where there is none."""
        places = g.op.Where(where, g.op.Add(grid.places, g.const(by)), g.const(0))
        return reduce(g, "ReduceMax", g.op.Concat(places, none, axis=axis), [axis], True)

    end = g.op.Sub(last(long, span + 1), g.const(1))
    inside = g.op.Less(grid.places, end)
    return last(g.op.And(inside, g.op.Not(edges)), 1), end


def _at(g: GraphBuilder, grid: Grid, x: Number, k: Value) -> Number:
    """The elements k (``[*batch, 1]``) of lists ``[*batch, n]``; 0 outside of them."""
    here = g.op.Equal(grid.places, k)
    picked = [g.op.Where(here, part, g.const(0.0, dtype_of(part))) for part in x]
    return [reduce(g, "ReduceSum", part, [rank_of(part) - 1], True) for part in picked]


class Two(NamedTuple):
    """The parts of the eigenvalues of real matrices ``[[a, b], [c, d]]``: less d they are ``mean ± i root`` where they are
    ``paired``, and otherwise ``far`` and ``near``, which is closer to 0."""

    paired: Value
    mean: Value
    root: Value
    far: Value
    near: Value


def block_of_two(g: GraphBuilder, a: Value, b: Value, c: Value, d: Value) -> Two:
    """The eigenvalues of real matrices of two rows, without cancellation."""
    dtype = dtype_of(a)
    zero = g.const(0.0, dtype)
    mean = g.op.Mul(g.op.Sub(a, d), g.const(0.5, dtype))
    product = g.op.Mul(b, c)
    square = g.op.Add(g.op.Mul(mean, mean), product)
    root = g.op.Sqrt(g.op.Abs(square))
    far = g.op.Where(g.op.Less(mean, zero), g.op.Sub(mean, root), g.op.Add(mean, root))
    near = g.op.Div(product, g.op.Where(g.op.Equal(far, zero), g.const(1.0, dtype), far))
    return Two(g.op.Less(square, zero), mean, root, far, g.op.Neg(near))


def _real_shifts(g: GraphBuilder, grid: Grid, bands: _Bands, last: Value, stuck: Value) -> tuple[Value, Value]:
    """The shifts ``r ± i s`` of a step of real matrices as r and s, ``[*batch, 1]``.

    The eigenvalues of the last block of two; where they are real, twice the eigenvalue that is closer to the last element.
    """
    before = g.op.Sub(last, g.const(1))
    (a,), (b,), (c,) = (_at(g, grid, x, before) for x in (bands.main, bands.upper, bands.lower))
    (d,), (above,) = _at(g, grid, bands.main, last), _at(g, grid, bands.lower, g.op.Sub(last, g.const(2)))
    dtype = dtype_of(d)
    block = block_of_two(g, a, b, c, d)
    real = g.op.Add(d, g.op.Where(block.paired, block.mean, block.near))
    imag = g.op.Where(block.paired, block.root, g.const(0.0, dtype))
    size = g.op.Add(g.op.Abs(c), g.op.Abs(above))
    real = g.op.Where(stuck, g.op.Add(d, g.op.Mul(size, g.const(_SHIFT, dtype))), real)
    return real, g.op.Where(stuck, g.op.Mul(size, g.const(_SPREAD, dtype)), imag)


def _real_start(g: GraphBuilder, grid: Grid, bands: _Bands, first: Value, last: Value, stuck: Value) -> list[Number]:
    """The first column of ``(x - s) (x - t)``, for the shifts s and t of a step of real matrices: three numbers ``[*batch, 1]``."""
    real, imag = _real_shifts(g, grid, bands, last, stuck)
    dtype = dtype_of(real)
    zero = g.const(0.0, dtype)
    second = g.op.Add(first, g.const(1))
    ((h11,), (h12,), (h21,), (h22,), (h32,)) = (
        _at(g, grid, x, k)
        for x, k in (
            (bands.main, first), (bands.upper, first), (bands.lower, first), (bands.main, second), (bands.lower, second)
        )
    )  # fmt: skip
    gap = g.op.Sub(h11, real)
    scale = g.op.Sum(g.op.Abs(gap), imag, g.op.Abs(h21))
    scale = g.op.Where(g.op.Greater(scale, zero), scale, g.const(1.0, dtype))
    h21 = g.op.Div(h21, scale)
    squares = g.op.Add(g.op.Mul(g.op.Div(gap, scale), gap), g.op.Mul(g.op.Div(imag, scale), imag))
    return [
        [g.op.Add(squares, g.op.Mul(h12, h21))],
        [g.op.Mul(h21, g.op.Add(gap, g.op.Sub(h22, real)))],
        [g.op.Mul(h21, h32)],
    ]


def _complex_start(g: GraphBuilder, grid: Grid, bands: _Bands, first: Value, last: Value, stuck: Value) -> list[Number]:
    """The first column of ``x - s`` for the shift s of a step of complex matrices: two numbers ``[*batch, 1]``.

    The shift is that eigenvalue of the last block of two that is closer to the last element (Wilkinson).
    """
    before = g.op.Sub(last, g.const(1))
    a, b, c, d = (
        Complex(*_at(g, grid, x, k))
        for x, k in ((bands.main, before), (bands.upper, before), (bands.lower, before), (bands.main, last))
    )
    dtype = dtype_of(a.real)
    zero = g.const(0.0, dtype)
    p = c_scale(g, c_sub(g, a, d), g.const(0.5, dtype))
    product = c_mul(g, b, c)
    root = c_sqrt(g, c_add(g, c_mul(g, p, p), product))
    opposed = g.op.Less(g.op.Add(g.op.Mul(p.real, root.real), g.op.Mul(p.imag, root.imag)), zero)
    far = c_add(g, p, Complex(*(g.op.Where(opposed, g.op.Neg(r), r) for r in (root.real, root.imag))))
    none = g.op.Equal(_size(g, [far.real, far.imag]), zero)
    far = Complex(g.op.Where(none, g.const(1.0, dtype), far.real), far.imag)
    near = c_div(g, product, far)
    shift = c_sub(g, d, Complex(*(g.op.Where(none, zero, part) for part in (near.real, near.imag))))
    other = g.op.Mul(_size(g, [c.real, c.imag]), g.const(_SHIFT, dtype))
    shift = Complex(g.op.Where(stuck, g.op.Add(d.real, other), shift.real), g.op.Where(stuck, d.imag, shift.imag))
    head = c_sub(g, Complex(*_at(g, grid, bands.main, first)), shift)
    return [[head.real, head.imag], _at(g, grid, bands.lower, first)]


def _spread(g: GraphBuilder, grid: Grid, numbers: Sequence[Number], first: Value) -> Value:
    """Numbers ``[*batch, 1]`` as a stored column that begins in the row ``first``."""
    rank = rank_of(first) + 1
    column: Value | None = None
    for row, number in enumerate(numbers):
        blocks = [g.op.Mul(b, unsqueeze(g, part, rank - 1)) for b, part in zip(grid.units, number, strict=True)]
        block = blocks[0] if len(blocks) == 1 else g.op.Add(*blocks)
        here = g.op.Equal(grid.rows, unsqueeze(g, g.op.Add(first, g.const(row)), rank - 1))
        rest = g.const(0.0, dtype_of(block)) if column is None else column
        column = g.op.Where(here, block, rest)
    assert column is not None
    return column


def _chased(g: GraphBuilder, grid: Grid, states: list[Value], start: Value, first: Value, last: Value) -> list[Value]:
    """The states after a QR step of the rows ``first`` to ``last``: the bulge that the first reflection makes goes down."""
    rank = rank_of(states[0])
    zero = g.const(0.0, dtype_of(states[0]))
    width = 4 - grid.parts
    top, bottom = unsqueeze(g, first, rank - 1), unsqueeze(g, last, rank - 1)
    # Of an empty batch they would be the extremes of int64.
    begin = g.op.Where(g.op.Less(last, g.const(0)), g.as_scalar(grid.n), first)
    begin = g.op.Min(reduce(g, "ReduceMin", begin, None, False), g.as_scalar(grid.n))
    count = g.op.Sub(g.op.Max(reduce(g, "ReduceMax", last, None, False), begin), begin)

    def step(j: Value, *inner: Value) -> list[Value]:
        k = g.op.Add(j, begin)
        before = g.op.Max(g.op.Sub(k, g.const(1)), g.const(0))
        column = g.op.Where(g.op.Equal(top, k), start, _column(g, grid, inner[0], before))
        active = g.op.And(g.op.LessOrEqual(top, k), g.op.Less(k, bottom))
        inside = g.op.And(g.op.GreaterOrEqual(grid.rows, k), g.op.Less(grid.rows, g.op.Add(k, g.const(width))))
        inside = g.op.And(g.op.And(inside, g.op.LessOrEqual(grid.rows, bottom)), active)
        return _reflected(g, grid, g.op.Where(inside, column, zero), g.op.Equal(grid.rows, k), inner)

    return repeat(g, count, step, *states)


def schur(g: GraphBuilder, grid: Grid, x: Value, *, vectors: bool) -> tuple[Value, Value | None, Value]:
    """``T``, ``Z`` and whether T was found, ``[*batch, 1]``, with ``x = Z T Z^H``: Z unitary, T upper triangular.

    Real matrices have a real T, with blocks of two on its diagonal. The largest element of x is about 1.
    """
    dtype = dtype_of(x)
    batch = batch_of(g, x)
    size = g.dim(grid.columns, 0)
    states = [x]
    if vectors:
        states.append(full(g, eye(g, size, size, dtype), dtype, [*batch, size, size]))
    states = _hessenberg(g, grid, states)
    steps: Size = (
        max(_STEPS * grid.n, _LEAST_STEPS)
        if isinstance(grid.n, int)
        else g.op.Max(g.op.Mul(grid.n, g.const(_STEPS)), g.const(_LEAST_STEPS))
    )
    begin = _real_start if grid.parts == 1 else _complex_start

    def step(_: Value, tries: Value, end: Value, *inner: Value) -> list[Value]:
        cleaned, bands, edges = _cleaned(g, grid, inner[0])
        first, last = _window(g, grid, edges)
        tries = g.op.Where(g.op.Equal(last, end), g.op.Add(tries, g.const(1)), g.const(0))
        stuck = g.op.Equal(g.op.Mod(tries, g.const(_PATIENCE)), g.const(_PATIENCE - 1))
        start = _spread(g, grid, begin(g, grid, bands, first, last, stuck), first)
        results = _chased(g, grid, [cleaned, *inner[1:]], start, first, last)
        busy = g.op.GreaterOrEqual(reduce(g, "ReduceMax", last, None, False), g.const(0))
        return [busy, tries, last, *results]

    counters = [full(g, 0, INT64, [*batch, 1]) for _ in range(2)]
    states = repeat(g, steps, step, *counters, *states, until=True)[2:]
    cleaned, _, edges = _cleaned(g, grid, states[0])
    return cleaned, states[1] if vectors else None, g.op.Less(_window(g, grid, edges)[1], g.const(0))
