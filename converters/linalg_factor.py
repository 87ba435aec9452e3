"""Factorizations of dense matrices: Cholesky, LU, QR."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.cholesky import cholesky
from onnxplug.converters.helpers.dtypes import INT32, INT64
from onnxplug.converters.helpers.grids import iota, smaller
from onnxplug.converters.helpers.lu import first_zero, lu, permutation_of
from onnxplug.converters.helpers.matrices import cut, dtype_of, transpose, triangle
from onnxplug.converters.helpers.qr import householder, orthogonal, reflect
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def linalg_cholesky_ex(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_cholesky_ex(Tensor self, *, bool upper=False, bool check_errors=False) -> (Tensor L, Tensor info)

    Reads one triangle, as torch does. Where ``info`` is not 0, the factor is NaN from that minor on; ``check_errors``
    is ignored, since an ONNX model raises no errors.
    """
    a, upper = node.args[:2]
    factor, info = cholesky(g, transpose(g, a) if upper else a)
    return [transpose(g, factor) if upper else factor, info]


def cholesky_(g: GraphBuilder, node: FxNode) -> Value:
    """cholesky(Tensor self, bool upper=False) -> Tensor"""
    return linalg_cholesky_ex(g, node)[0]


def linalg_lu_factor_ex(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_lu_factor_ex(Tensor A, *, bool pivot=True, bool check_errors=False) -> (Tensor LU, Tensor pivots, Tensor info)"""
    a, pivoting = node.args[:2]
    packed, _, pivots = lu(g, a, pivots=True, pivoting=pivoting)
    assert pivots is not None
    return [packed, g.cast(pivots, INT32), first_zero(g, packed)]


def _permutation_matrix(g: GraphBuilder, order: Value, dtype: ir.DataType) -> Value:
    """``P`` with ``A = P A[order]``: its column i is 1 in row ``order[i]``."""
    rows = unsqueeze(g, iota(g, g.dim(order, -1)), 1)
    return g.cast(g.op.Equal(rows, unsqueeze(g, order, rank_of(order) - 1)), dtype)


def _unpacked(g: GraphBuilder, packed: Value) -> tuple[Value, Value]:
    """L with its unit diagonal, ``[*batch, m, k]``, and U, ``[*batch, k, n]``."""
    m, n = g.dim(packed, -2), g.dim(packed, -1)
    k = smaller(g, m, n)
    lower = packed if k is n else cut(g, packed, -1, 0, k)
    upper = packed if k is m else cut(g, packed, -2, 0, k)
    return triangle(g, lower, upper=False, diagonal=1.0), triangle(g, upper, upper=True)


def _no_matrix(g: GraphBuilder, dtype: ir.DataType) -> Value:
    """The empty tensor that torch returns for a factor that was not requested."""
    return g.cast(g.const(np.zeros(0, dtype=np.float32)), dtype)


def linalg_lu(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_lu(Tensor A, *, bool pivot=True) -> (Tensor P, Tensor L, Tensor U)"""
    a, pivoting = node.args
    packed, order, _ = lu(g, a, permutation=pivoting, pivoting=pivoting)
    lower, upper = _unpacked(g, packed)
    matrix = _no_matrix(g, node.dtype) if order is None else _permutation_matrix(g, order, node.dtype)
    return [matrix, lower, upper]


def lu_unpack(g: GraphBuilder, node: FxNode) -> list[Value]:
    """lu_unpack(Tensor LU_data, Tensor LU_pivots, bool unpack_data=True, bool unpack_pivots=True) -> (Tensor P, Tensor L, Tensor U)"""  # noqa: E501
    packed, pivots, data, permutation = node.args
    dtype = dtype_of(packed)
    matrix = lower = upper = _no_matrix(g, dtype)
    if permutation:
        order = permutation_of(g, g.cast(pivots, INT64), g.dim(packed, -2))
        matrix = _permutation_matrix(g, order, dtype)
    if data:
        lower, upper = _unpacked(g, packed)
    return [matrix, lower, upper]


def linalg_qr(g: GraphBuilder, node: FxNode) -> list[Value]:
    """linalg_qr(Tensor A, str mode="reduced") -> (Tensor Q, Tensor R)"""
    a, mode = node.args
    m, n = g.dim(a, -2), g.dim(a, -1)
    packed, tau = householder(g, a)
    k = m if mode == "complete" else smaller(g, m, n)
    upper = triangle(g, packed if k is m else cut(g, packed, -2, 0, k), upper=True)
    if mode == "r":
        return [_no_matrix(g, node.dtype), upper]
    return [orthogonal(g, packed, tau, k), upper]


def geqrf(g: GraphBuilder, node: FxNode) -> list[Value]:
    """geqrf(Tensor self) -> (Tensor a, Tensor tau)"""
    return list(householder(g, node.args[0]))


def linalg_householder_product(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_householder_product(Tensor input, Tensor tau) -> Tensor"""
    packed, tau = node.args
    return orthogonal(g, packed, tau, g.dim(packed, -1))


def ormqr(g: GraphBuilder, node: FxNode) -> Value:
    """ormqr(Tensor self, Tensor input2, Tensor input3, bool left=True, bool transpose=False) -> Tensor

    A product from the right is computed by transposes: ``C Q = (Q^T C^T)^T``.
    """
    packed, tau, x, left, transposed = node.args
    if left:
        return reflect(g, packed, tau, x, forward=transposed)
    return transpose(g, reflect(g, packed, tau, transpose(g, x), forward=not transposed))


RULES: list[Rule] = [
    Rule("aten::linalg_cholesky_ex.default", linalg_cholesky_ex),
    Rule("aten::cholesky.default", cholesky_),
    Rule("aten::linalg_lu_factor_ex.default", linalg_lu_factor_ex),
    Rule("aten::linalg_lu.default", linalg_lu),
    Rule("aten::lu_unpack.default", lu_unpack),
    Rule("aten::linalg_qr.default", linalg_qr),
    Rule("aten::geqrf.default", geqrf),
    Rule("aten::linalg_householder_product.default", linalg_householder_product),
    Rule("aten::ormqr.default", ormqr),
]
