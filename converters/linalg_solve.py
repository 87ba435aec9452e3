"""Linear systems, inverses and determinants of dense matrices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import INT32, INT64
from onnxplug.converters.helpers.grids import common_batch, eye, full, iota, same_batch
from onnxplug.converters.helpers.loops import repeat
from onnxplug.converters.helpers.lu import eliminated, first_zero, inverse, lu, permutation_of, solve_triangular
from onnxplug.converters.helpers.matrices import diagonal, dtype_of, rearranged, transpose, triangle
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.results import wanted
from onnxplug.converters.helpers.runtimes import has_kernel
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def linalg_inv_ex(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_inv_ex(Tensor A, *, bool check_errors=False) -> (Tensor inverse, Tensor info)"""
    return list(inverse(g, node.args[0]))


def linalg_solve_ex(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_linalg_solve_ex(Tensor A, Tensor B, *, bool left=True, bool check_errors=False) -> (Tensor result, Tensor LU, Tensor pivots, Tensor info)

    ``X A = B`` is solved as ``A^T X^T = B^T``; LU and pivots are those of A in either case, as in torch.

    Raises:
        Unsupported: The factors are read, and torch gives those of the transpose of a contiguous matrix.
    """  # noqa: E501
    a, b, left = node.args[:3]
    vector = rank_of(b) == 1 or (rank_of(b) == rank_of(a) - 1 == len(node.shape))
    if vector:
        b = unsqueeze(g, b, rank_of(b))
    factors = wanted(node, 1) or wanted(node, 2)
    if factors and _factors_transposes(torch.ops.aten._linalg_solve_ex, 2):
        raise Unsupported("factors of a linear system in this torch, which depend on the strides of the matrix")
    pivots: Value | None = None
    if left and not factors and same_batch(g, a, b):
        packed, right = eliminated(g, a, b)
        x = solve_triangular(g, packed, right, upper=True)
    else:
        packed, order, pivots = lu(g, a, permutation=True, pivots=factors)
        assert order is not None
        x = _solved(g, packed, order, b, left=left, adjoint=False)
    if vector:
        x = squeeze(g, x, rank_of(x) - 1)
    return [x, packed, None if pivots is None else g.cast(pivots, INT32), first_zero(g, packed)]


@functools.cache
def _factors_transposes(operator: Any, operands: int = 1) -> bool:
    """Whether an operator of torch factorises the transpose of a contiguous matrix."""
    matrix = torch.tensor([[4.0, 1.0], [2.0, 3.0]])
    factors = next(result for result in operator(*[matrix] * operands)[1:] if result.dim() == 2)
    return float(factors[0, 1]) == 2.0


def _factored(g: GraphBuilder, node: FxNode, operator: Any) -> Value:
    """The matrix of a determinant whose factors torch gives: its backward reads them by the strides of the operand."""
    val = node.meta(0)
    is_transposed = val.is_contiguous() and not val.is_complex() and _factors_transposes(operator)
    return transpose(g, node.args[0]) if is_transposed else node.args[0]


def _solved(g: GraphBuilder, packed: Value, order: Value, b: Value, *, left: bool, adjoint: bool) -> Value:
    """``X`` of ``A X = B`` for ``A[order] = L U``; by the flags of ``A^T X = B``, ``X A = B``, ``X A^T = B``."""
    if not left:
        return transpose(g, _solved(g, packed, order, transpose(g, b), left=True, adjoint=not adjoint))
    sizes = [*common_batch(g, packed, b), *g.dims(b)[-2:]]
    batched = rank_of(order) > 1 or len(sizes) > 2
    order = full(g, order, INT64, [*sizes[:-2], g.dim(order, -1)]) if batched else order
    if not adjoint:
        b = rearranged(g, full(g, b, dtype_of(b), sizes), order, -2)
        y = solve_triangular(g, packed, b, upper=False, unit=True)
        return solve_triangular(g, packed, y, upper=True)
    flipped = transpose(g, packed)
    y = solve_triangular(g, flipped, b, upper=False)
    y = solve_triangular(g, flipped, y, upper=True, unit=True)
    index = full(g, unsqueeze(g, order, rank_of(order)), INT64, sizes)
    return g.op.ScatterElements(y, index, y, axis=len(sizes) - 2)


def linalg_lu_solve(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_lu_solve(Tensor LU, Tensor pivots, Tensor B, *, bool left=True, bool adjoint=False) -> Tensor"""
    packed, pivots, b, left, adjoint = node.args
    order = permutation_of(g, g.cast(pivots, INT64), g.dim(packed, -1))
    return _solved(g, packed, order, b, left=left, adjoint=adjoint)


def linalg_solve_triangular(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_solve_triangular(Tensor self, Tensor B, *, bool upper, bool left=True, bool unitriangular=False) -> Tensor"""
    a, b, upper, left, unit = node.args
    if left:
        return solve_triangular(g, a, b, upper=upper, unit=unit)
    return transpose(g, solve_triangular(g, transpose(g, a), transpose(g, b), upper=not upper, unit=unit))


def triangular_solve(g: GraphBuilder, node: FxNode) -> list[Value]:
    """triangular_solve(Tensor self, Tensor A, bool upper=True, bool transpose=False, bool unitriangular=False) -> (Tensor solution, Tensor cloned_coefficient)"""  # noqa: E501
    b, a, upper, transposed, unit = node.args
    matrix = transpose(g, a) if transposed else a
    x = solve_triangular(g, matrix, b, upper=upper != transposed, unit=unit)
    return [x, full(g, a, node.dtype, [*common_batch(g, a, b), *g.dims(a)[-2:]])]


def cholesky_solve(g: GraphBuilder, node: FxNode) -> Value:
    """cholesky_solve(Tensor self, Tensor input2, bool upper=False) -> Tensor"""
    b, factor, upper = node.args
    lower = transpose(g, factor) if upper else factor
    y = solve_triangular(g, lower, b, upper=False)
    return solve_triangular(g, transpose(g, lower), y, upper=True)


def cholesky_inverse(g: GraphBuilder, node: FxNode) -> Value:
    """cholesky_inverse(Tensor self, bool upper=False) -> Tensor

    ``inv(L)^T inv(L)``, exactly symmetric as LAPACK's potri.
    """
    factor, upper = node.args
    n = g.dim(factor, -1)
    lower = transpose(g, factor) if upper else factor
    inverted = solve_triangular(g, lower, full(g, eye(g, n, n, node.dtype), node.dtype, g.dims(factor)), upper=False)
    whole = g.op.MatMul(transpose(g, inverted), inverted)
    return g.op.Add(triangle(g, whole, upper=False), transpose(g, triangle(g, whole, upper=False, strict=True)))


def _parity(g: GraphBuilder, pivots: Value, dtype: ir.DataType) -> Value:
    """1 or -1 as the number of rows that were swapped is even or odd."""
    places = g.op.Add(iota(g, g.dim(pivots, -1)), g.const(1))
    swapped = g.cast(g.op.Not(g.op.Equal(pivots, places)), INT64)
    count = reduce(g, "ReduceSum", swapped, [rank_of(pivots) - 1], False)
    return g.cast(g.op.Sub(g.const(1), g.op.Mul(g.const(2), g.op.Mod(count, g.const(2)))), dtype)


def linalg_det(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_linalg_det(Tensor A) -> (Tensor result, Tensor LU, Tensor pivots)

    By LU where its factors are used too, or Det has no kernel.
    """
    factors = wanted(node, 1) or wanted(node, 2)
    if not factors and has_kernel(g, "Det", node.dtype):
        return [g.op.Det(node.args[0]), None, None]
    a = _factored(g, node, torch.ops.aten._linalg_det) if factors else node.args[0]
    packed, _, pivots = lu(g, a, pivots=True)
    assert pivots is not None
    product = reduce(g, "ReduceProd", diagonal(g, packed), [rank_of(a) - 2], False)
    return [g.op.Mul(_parity(g, pivots, node.dtype), product), packed, g.cast(pivots, INT32)]


def linalg_slogdet(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_linalg_slogdet(Tensor A) -> (Tensor sign, Tensor logabsdet, Tensor LU, Tensor pivots)

    A singular matrix has the sign 0 and the logarithm -inf; NaN has the sign 0, as torch's sgn of it.
    """
    factors = wanted(node, 2) or wanted(node, 3)
    a = _factored(g, node, torch.ops.aten._linalg_slogdet) if factors else node.args[0]
    packed, _, pivots = lu(g, a, pivots=True)
    assert pivots is not None
    heads = diagonal(g, packed)
    last = [rank_of(a) - 2]
    signs = g.op.Where(g.op.IsNaN(heads), g.const(0.0, node.dtype), g.op.Sign(heads))
    sign = g.op.Mul(_parity(g, pivots, node.dtype), reduce(g, "ReduceProd", signs, last, False))
    logarithm = reduce(g, "ReduceSum", g.op.Log(g.op.Abs(heads)), last, False)
    return [sign, logarithm, packed, g.cast(pivots, INT32)]


def linalg_vander(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_vander(Tensor x, *, SymInt? N=None) -> Tensor

    Powers by repeated products, as torch's cumprod gives them; the sum of logarithms or Pow would not be exact.
    """
    x, count = node.args
    x = g.cast(x, node.dtype)
    if not rank_of(x):
        x = unsqueeze(g, x, 0)
    count = g.dim(x, -1) if count is None else count
    columns = iota(g, count)
    one = g.const(np.array(1), node.dtype)
    base = unsqueeze(g, x, rank_of(x))

    def step(j: Value, powers: Value) -> list[Value]:
        return [g.op.Mul(powers, g.op.Where(g.op.Greater(columns, j), base, one))]

    start = full(g, one, node.dtype, [*g.dims(x), count])
    return repeat(g, count, step, start)[0]


RULES: list[Rule] = [
    Rule("aten::linalg_inv_ex.default", linalg_inv_ex),
    Rule("aten::_linalg_solve_ex.default", linalg_solve_ex),
    Rule("aten::linalg_lu_solve.default", linalg_lu_solve),
    Rule("aten::linalg_solve_triangular.default", linalg_solve_triangular),
    Rule("aten::triangular_solve.default", triangular_solve),
    Rule("aten::cholesky_solve.default", cholesky_solve),
    Rule("aten::cholesky_inverse.default", cholesky_inverse),
    Rule("aten::_linalg_det.default", linalg_det),
    Rule("aten::_linalg_slogdet.default", linalg_slogdet),
    Rule("aten::linalg_vander.default", linalg_vander),
]
