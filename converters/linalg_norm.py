"""Norms and condition numbers of matrices.

torch has composite kernels for them, but tracing one on symbolic sizes decides whether a matrix is empty, or how large
it is, by the example: the result would be right for the example's sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axes, rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import FLOAT, HALVES, INT32
from onnxplug.converters.helpers.jacobi import svd
from onnxplug.converters.helpers.lu import inverse
from onnxplug.converters.helpers.matrices import dtype_of
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _extremum(g: GraphBuilder, end: str, x: Value, axis: int) -> Value:
    """The greatest or the least (Max, Min) of norms; the greatest of none is 0.

    ONNX Runtime's ReduceMax and ReduceMin skip NaN. The sum of the norms, which are not negative, is NaN exactly if any
    of them is.
    """
    dtype = dtype_of(x)
    extremum = reduce(g, f"Reduce{end}", x, [axis], True)
    if end == "Max":
        extremum = g.op.Where(g.op.Equal(extremum, g.const(-math.inf, dtype)), g.const(0.0, dtype), extremum)
    spoilt = g.op.IsNaN(reduce(g, "ReduceSum", x, [axis], True))
    return g.op.Where(spoilt, g.const(math.nan, dtype), extremum)


def _norm(g: GraphBuilder, x: Value, order: float | str, axes: Sequence[int], keepdim: bool) -> Value:
    """The norm of the matrices that two axes span (Golub & Van Loan, 2.3)."""
    rank = rank_of(x)
    rows, columns = normalize_axes(list(axes), rank)
    if order == "fro":
        return _dropped(
            g, g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(x, x), [rows, columns], True)), rows, columns, keepdim
        )
    if order in ("nuc", 2, -2):
        rest = [axis for axis in range(rank) if axis not in (rows, columns)]
        s = svd(g, g.op.Transpose(x, perm=[*rest, rows, columns]), vectors=False).s
        last = rank - 2
        if order == "nuc":
            norm = reduce(g, "ReduceSum", s, [last], True)
        else:
            norm = _extremum(g, "Max" if order == 2 else "Min", s, last)
        norm = squeeze(g, norm, last)
        return unsqueeze(g, norm, *sorted((rows, columns))) if keepdim else norm
    if order not in (1, -1, math.inf, -math.inf):
        raise Unsupported(f"the matrix norm of order {order!r}")
    along, over = (rows, columns) if abs(float(order)) == 1 else (columns, rows)
    sums = reduce(g, "ReduceSum", g.op.Abs(x), [along], True)
    norm = _extremum(g, "Max" if float(order) > 0 else "Min", sums, over)
    return _dropped(g, norm, rows, columns, keepdim)


def _dropped(g: GraphBuilder, x: Value, rows: int, columns: int, keepdim: bool) -> Value:
    return x if keepdim else squeeze(g, x, *sorted((rows, columns)))


def linalg_matrix_norm(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_matrix_norm(Tensor self, Scalar ord, int[] dim=[-2, -1], bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    x, order, axes, keepdim = node.args[:4]
    inner = FLOAT if node.dtype in HALVES else node.dtype
    return g.cast(_norm(g, g.cast(x, inner), order, axes, keepdim), node.dtype)


def linalg_norm(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_norm(Tensor self, Scalar? ord=None, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor

    A matrix norm if an order and two axes are given; otherwise the decomposition computes a vector norm.
    """
    x, order, axes, keepdim = node.args[:4]
    count = rank_of(x) if axes is None else len(axes)
    if order is None or count != 2:
        return g.call_next(node)
    inner = FLOAT if node.dtype in HALVES else node.dtype
    return g.cast(_norm(g, g.cast(x, inner), order, axes or (0, 1), keepdim), node.dtype)


def linalg_cond(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_cond(Tensor self, Scalar? p=None) -> Tensor

    The norm times that of the inverse; infinite for a singular matrix and where the product is NaN, as in torch; 0 for
    an empty matrix.
    """
    a, order = node.args
    dtype = node.dtype
    n = g.dim(a, -1)
    if order in (None, 2, -2):
        s = svd(g, a, vectors=False).s
        last = rank_of(s) - 1
        ends = [squeeze(g, _extremum(g, end, s, last), last) for end in ("Max", "Min")]
        quotient = g.op.Div(*(reversed(ends) if order == -2 else ends))
        n = g.dim(s, -1)
    else:
        inverted, info = inverse(g, a)
        quotient = g.op.Mul(_norm(g, a, order, (-2, -1), False), _norm(g, inverted, order, (-2, -1), False))
        bad = g.op.Or(g.op.IsNaN(quotient), g.op.Greater(info, g.const(0, INT32)))
        quotient = g.op.Where(bad, g.const(math.inf, dtype), quotient)
    if isinstance(n, int) and n > 0:
        return quotient
    return g.op.Where(g.op.Equal(g.as_scalar(n), g.const(0)), g.const(0.0, dtype), quotient)


RULES: list[Rule] = [
    Rule("aten::linalg_matrix_norm.default", linalg_matrix_norm),
    Rule("aten::linalg_matrix_norm.str_ord", linalg_matrix_norm),
    Rule("aten::linalg_norm.default", linalg_norm),
    Rule("aten::linalg_norm.ord_str", linalg_norm),
    Rule("aten::linalg_cond.default", linalg_cond),
    Rule("aten::linalg_cond.p_str", linalg_cond),
]
