"""Singular values, symmetric eigenvalues and functions of them; the matrix exponential."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.complex_pairs import as_complex, part_dtype
from onnxplug.converters.helpers.dtypes import DOUBLE, INT64
from onnxplug.converters.helpers.grids import eye
from onnxplug.converters.helpers.jacobi import eigh, svd
from onnxplug.converters.helpers.loops import repeat
from onnxplug.converters.helpers.matrices import dtype_of, epsilon, transpose, triangle
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.schur import grid_of, parts_of, stored
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _nothing(g: GraphBuilder, dtype: ir.DataType) -> Value:
    """The empty tensor that torch returns for a factor that was not requested."""
    return g.const(np.zeros(0), dtype)


def linalg_svd(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_linalg_svd(Tensor A, bool full_matrices=False, bool compute_uv=True, *, str? driver=None) -> (Tensor U, Tensor S, Tensor Vh)"""  # noqa: E501
    a, complete, vectors = node.args[:3]
    u, s, vh = svd(g, a, vectors=vectors, complete=complete)
    empty = _nothing(g, node.dtype)
    return [empty if u is None else u, s, empty if vh is None else vh]


def _symmetric(g: GraphBuilder, a: Value, upper: bool) -> Value:
    """The symmetric matrix with a given triangle."""
    strict = triangle(g, a, upper=upper, strict=True)
    return g.op.Add(triangle(g, a, upper=upper), transpose(g, strict))


def linalg_eigh(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_linalg_eigh(Tensor A, str UPLO="L", bool compute_v=True) -> (Tensor eigenvalues, Tensor eigenvectors)"""
    a, uplo, vectors = node.args
    values, eigenvectors = eigh(g, _symmetric(g, a, uplo.upper() == "U"))
    return [values, eigenvectors if vectors else _nothing(g, node.dtype)]


def linalg_matrix_sqrth(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_matrix_sqrth(Tensor self) -> Tensor

    ``V diag(sqrt(w)) V^T`` of the eigenvalues w and eigenvectors V of the lower triangle, ``[*batch, n, n]``. Negative
    eigenvalues count as 0, as in torch.
    """
    (a,) = node.args
    w, v = eigh(g, _symmetric(g, a, False))
    zero = g.const(0.0, node.dtype)
    root = g.op.Sqrt(g.op.Where(g.op.Less(w, zero), zero, w))
    return g.op.MatMul(g.op.Mul(v, unsqueeze(g, root, rank_of(root) - 1)), transpose(g, v))


def linalg_polar(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_polar(Tensor A) -> (Tensor U, Tensor H)

    Of the singular value decomposition ``A = U S V^T``, ``[*batch, m, n]`` with m >= n: ``U V^T`` with orthonormal columns,
    and ``V S V^T``, which torch makes exactly symmetric.
    """
    (a,) = node.args
    u, s, vh = svd(g, a)
    assert u is not None and vh is not None
    h = g.op.MatMul(g.op.Mul(transpose(g, vh), unsqueeze(g, s, rank_of(s) - 1)), vh)
    half = g.const(0.5, node.dtype)
    return [g.op.MatMul(u, vh), g.op.Mul(g.op.Add(h, transpose(g, h)), half)]


def _longer(g: GraphBuilder, a: Value, dtype: ir.DataType) -> Value:
    """The greater of the last two sizes, as a number."""
    m, n = g.dim(a, -2), g.dim(a, -1)
    if isinstance(m, int) and isinstance(n, int):
        return g.const(float(max(m, n)), dtype)
    return g.cast(g.op.Max(g.as_scalar(m), g.as_scalar(n)), dtype)


def linalg_pinv(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_pinv.atol_rtol_tensor(Tensor self, *, Tensor? atol=None, Tensor? rtol=None, bool hermitian=False) -> Tensor

    Singular values of at most ``max(atol, rtol * largest)`` count as 0. Without rtol it is eps max(m, n), and 0 where a
    positive atol is given.
    """
    a, atol, rtol, hermitian = node.args
    dtype = node.dtype
    if hermitian:
        s, left = eigh(g, _symmetric(g, a, False))
        u, vh, size = left, transpose(g, left), g.op.Abs(s)
    else:
        factors = svd(g, a)
        assert factors.u is not None and factors.vh is not None
        u, s, vh = factors.u, factors.s, factors.vh
        size = s
    top = reduce(g, "ReduceMax", size, [rank_of(s) - 1], True)
    inverse = _inverse_values(g, s, size, top, _tolerance(g, a, atol, rtol, top, dtype))
    scaled = g.op.Mul(transpose(g, vh), unsqueeze(g, inverse, rank_of(s) - 1))
    return g.op.MatMul(scaled, transpose(g, u))


def _tolerance(g: GraphBuilder, a: Value, atol: Any, rtol: Any, top: Value, dtype: ir.DataType) -> Value:
    """The bound below which singular values count as 0, ``[*batch, 1]``."""
    absolute = None if atol is None else unsqueeze(g, g.cast(atol, dtype), rank_of(atol))
    if rtol is not None:
        relative = unsqueeze(g, g.cast(rtol, dtype), rank_of(rtol))
    else:
        relative = g.op.Mul(g.const(epsilon(dtype), dtype), _longer(g, a, dtype))
        if absolute is not None:
            relative = g.op.Where(g.op.Greater(absolute, g.const(0.0, dtype)), g.const(0.0, dtype), relative)
    bound = g.op.Mul(relative, top)
    return bound if absolute is None else g.op.Max(absolute, bound)


def _inverse_values(g: GraphBuilder, s: Value, size: Value, top: Value, bound: Value) -> Value:
    """``1 / s``, and 0 for singular values that count as 0; NaN stays NaN."""
    dtype = dtype_of(s)
    small = g.op.LessOrEqual(size, bound)
    safe = g.op.Where(small, g.const(1.0, dtype), s)
    return g.op.Where(small, g.const(0.0, dtype), g.op.Reciprocal(safe))


#: Terms of the series, its powers in blocks (Paterson & Stockmeyer), and the 1-norm up to which the backward error of so
#: many terms is below rounding (Al-Mohy & Higham 2011, table 3.1).
_TERMS, _BLOCK = 20, 5
_REACH = 1.4


def linalg_matrix_exp(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_matrix_exp(Tensor self) -> Tensor

    Scaling and squaring of the Taylor series, each matrix by its own power of two (Higham, Functions of Matrices, 10.3). In
    double for every dtype: the errors of float are small relative to the largest element, but not to smaller elements.
    """
    return g.cast(_exponential(g, g.cast(node.args[0], DOUBLE)), node.dtype)


def complex_matrix_exp(g: GraphBuilder, node: FxNode) -> Complex:
    """linalg_matrix_exp(Tensor self) -> Tensor

    Of the real matrix with ``[[a, -b], [b, a]]`` instead of each ``a + bi``.
    """
    x = as_complex(g, node.args[0], DOUBLE)
    parts = [x.real, x.imag]
    grid = grid_of(g, parts)
    exponential = parts_of(g, grid, _exponential(g, stored(g, grid, parts)))
    return Complex(*(g.cast(part, part_dtype(node)) for part in exponential))


def _exponential(g: GraphBuilder, a: Value) -> Value:
    """The exponential of real matrices of doubles."""
    dtype, rank = DOUBLE, rank_of(a)
    sums = reduce(g, "ReduceSum", g.op.Abs(a), [rank - 2], True)
    norm = reduce(g, "ReduceMax", sums, [rank - 1], True)
    reach = g.const(_REACH, dtype)
    large = g.op.And(g.op.Greater(norm, reach), g.op.Less(norm, g.const(math.inf, dtype)))
    ratio = g.op.Where(large, g.op.Div(norm, reach), g.const(1.0, dtype))
    count = g.op.Ceil(g.op.Mul(g.op.Log(ratio), g.const(1 / math.log(2), dtype)))
    scaled = g.op.Div(a, g.op.Pow(g.const(2.0, dtype), count))
    start = _series(g, scaled)

    def step(j: Value, power: Value) -> list[Value]:
        return [g.op.Where(g.op.Less(g.cast(j, dtype), count), g.op.MatMul(power, power), power)]

    # ReduceMax of an empty batch is -inf, which is no count.
    most = g.op.Max(reduce(g, "ReduceMax", count, None, False), g.const(0.0, dtype))
    return repeat(g, g.cast(most, INT64), step, start)[0]


def _series(g: GraphBuilder, a: Value) -> Value:
    """The exponential series up to ``a**20 / 20!``, by 7 products: Horner's rule in ``a**5``."""
    dtype = dtype_of(a)
    n = g.dim(a, -1)
    powers = [eye(g, n, n, dtype), a]
    while len(powers) <= _BLOCK:
        half = len(powers) // 2
        powers.append(g.op.MatMul(powers[half], powers[len(powers) - half]))
    result: Value | None = None
    for block in reversed(range(0, _TERMS, _BLOCK)):
        width = _BLOCK + 1 if result is None else _BLOCK
        terms = [g.op.Mul(powers[i], g.const(1 / math.factorial(block + i), dtype)) for i in range(width)]
        total = g.op.Sum(*terms)
        result = total if result is None else g.op.Add(total, g.op.MatMul(powers[_BLOCK], result))
    assert result is not None
    return result


RULES: list[Rule] = [
    Rule("aten::_linalg_svd.default", linalg_svd),
    Rule("aten::_linalg_eigh.default", linalg_eigh),
    Rule("aten::linalg_matrix_sqrth.default", linalg_matrix_sqrth),
    Rule("aten::linalg_polar.default", linalg_polar),
    Rule("aten::linalg_pinv.atol_rtol_tensor", linalg_pinv),
    Rule("aten::linalg_matrix_exp.default", linalg_matrix_exp),
    complex_rule("linalg_matrix_exp.default", complex_matrix_exp),
]
