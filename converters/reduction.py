"""Reductions along axes and of everything."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axes, normalize_axis, rank_of, squeeze
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, INT64
from onnxplug.converters.helpers.reductions import reduce, reduced, reduction_dtype
from onnxplug.converters.helpers.slices import diagonal_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def whole(op_type: str) -> Converter:
    """A reduction of everything: sum, mean, prod, amax …"""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        return reduced(g, op_type, node.args[0], None, False, node.dtype)

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}_all"
    return convert


def along(op_type: str) -> Converter:
    """A reduction along axes: ``(x, dim, keepdim, …)``."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axes, keepdim = node.args[:3]
        return reduced(g, op_type, x, axes, keepdim, node.dtype)

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}_dim"
    return convert


def any_(g: GraphBuilder, node: FxNode) -> Value:
    """any(Tensor self) -> Tensor"""
    return _truth(g, node, "ReduceMax")


def all_(g: GraphBuilder, node: FxNode) -> Value:
    """all(Tensor self) -> Tensor"""
    return _truth(g, node, "ReduceMin")


def _truth(g: GraphBuilder, node: FxNode, op_type: str) -> Value:
    """The largest or smallest of the truth values; of no elements ``any`` is false and ``all`` true, hence the sums."""
    x = node.args[0]
    axes, keepdim = (node.args[1], node.args[2]) if len(node.args) > 2 else (None, False)
    rank = rank_of(x)
    if axes == []:  # Unlike sums, over no axes at all.
        return g.cast(g.cast(x, BOOL), node.dtype)
    wanted = g.cast(x, BOOL) if op_type == "ReduceMax" else g.op.Not(g.cast(x, BOOL))
    count = reduce(g, "ReduceSum", g.cast(wanted, INT64), normalize_axes(axes, rank) if rank else None, keepdim)
    found = g.op.Greater(count, g.const(0))
    result: Value = found if op_type == "ReduceMax" else g.op.Not(found)
    return g.cast(result, node.dtype)


def arg_extremum(op_type: str) -> Converter:
    """argmax, argmin: the first of equal ones, the first NaN before all; of everything when no axis is given."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axis, keepdim = node.args
        x = g.cast(x, reduction_dtype(x.dtype))
        rank = rank_of(x)
        if not rank:
            return g.const(0)
        if axis is None:
            index = _first_extremum(g, op_type, g.reshape(x, [-1]), 0, False)
            return g.reshape(index, [1] * rank) if keepdim else index
        return _first_extremum(g, op_type, x, normalize_axis(axis, rank), keepdim)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def _first_extremum(g: GraphBuilder, op_type: str, x: Value, axis: int, keepdim: bool) -> Value:
    keep = int(keepdim)
    index: Value = getattr(g.op, op_type)(x, axis=axis, keepdims=keep)
    if x.dtype is None or not x.dtype.is_floating_point():
        return index
    flags = g.cast(g.op.IsNaN(x), FLOAT)
    first = g.op.ArgMax(flags, axis=axis, keepdims=keep)
    some = g.cast(reduce(g, "ReduceMax", flags, [axis], keepdim), BOOL)
    result: Value = g.op.Where(some, first, index)
    return result


def extremum_dim(op_type: str) -> Converter:
    """max.dim, min.dim: values and the index of the first of equal ones."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, axis, keepdim = node.args
        if not rank_of(x):
            return [x, g.const(0)]
        axis = normalize_axis(axis, rank_of(x))
        values = reduced(g, f"Reduce{op_type}", x, axis, keepdim, x.dtype)
        indices = _first_extremum(g, f"Arg{op_type}", g.cast(x, reduction_dtype(x.dtype)), axis, keepdim)
        return [values, indices]

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}_dim"
    return convert


def logsumexp(g: GraphBuilder, node: FxNode) -> Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor

    Shifted by the maximum where that is finite, so that a row of −inf gives −inf and not NaN.
    """
    x, axes, keepdim = node.args
    dtype = reduction_dtype(node.dtype)
    x = g.cast(x, dtype)
    rank = rank_of(x)
    over = normalize_axes(axes, rank) if rank else None
    top = reduce(g, "ReduceMax", x, over, True)
    shift = g.op.Where(g.op.IsInf(top), g.const(0.0, dtype), top)
    total = reduce(g, "ReduceSum", g.op.Exp(g.op.Sub(x, shift)), over, True)
    result = g.op.Add(g.op.Log(total), shift)
    if not keepdim and over:
        result = squeeze(g, result, *over)
    return g.cast(result, node.dtype)


def cumsum(g: GraphBuilder, node: FxNode) -> Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    x, axis = node.args[:2]
    if not rank_of(x):
        return g.cast(x, node.dtype)
    inner = reduction_dtype(node.dtype)
    return g.cast(g.op.CumSum(g.cast(x, inner), g.const(axis % rank_of(x))), node.dtype)


def count_nonzero(g: GraphBuilder, node: FxNode) -> Value:
    """count_nonzero(Tensor self, int? dim=None) -> Tensor"""
    x = node.args[0]
    return reduced(g, "ReduceSum", g.cast(g.cast(x, BOOL), INT64), node.args[1], False, INT64)


def prod_dim(g: GraphBuilder, node: FxNode) -> Value:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    x, axis, keepdim = node.args[:3]
    if node.dtype == INT64 and isinstance(axis, Value):
        raise Unsupported("prod over a dynamic axis")
    return reduced(g, "ReduceProd", x, axis, keepdim, node.dtype)


def aminmax(g: GraphBuilder, node: FxNode) -> list[Value]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)"""
    x, axis, keepdim = node.args
    return [reduced(g, f"Reduce{end}", x, axis, keepdim, x.dtype) for end in ("Min", "Max")]


def trace(g: GraphBuilder, node: FxNode) -> Value:
    """trace(Tensor self) -> Tensor"""
    return reduced(g, "ReduceSum", diagonal_of(g, node.args[0], 0, 0, 1), None, False, node.dtype)


RULES: list[Rule] = [
    Rule("aten::sum.default", whole("ReduceSum")),
    Rule("aten::trace.default", trace),
    Rule("aten::sum.dim_IntList", along("ReduceSum")),
    Rule("aten::mean.default", whole("ReduceMean")),
    Rule("aten::mean.dim", along("ReduceMean")),
    Rule("aten::prod.default", whole("ReduceProd")),
    Rule("aten::prod.dim_int", prod_dim),
    Rule("aten::amax.default", along("ReduceMax")),
    Rule("aten::amin.default", along("ReduceMin")),
    Rule("aten::max.default", whole("ReduceMax")),
    Rule("aten::min.default", whole("ReduceMin")),
    Rule("aten::max.dim", extremum_dim("Max")),
    Rule("aten::min.dim", extremum_dim("Min")),
    Rule("aten::aminmax.default", aminmax),
    Rule("aten::argmax.default", arg_extremum("ArgMax")),
    Rule("aten::argmin.default", arg_extremum("ArgMin")),
    *[Rule(f"aten::any.{overload}", any_) for overload in ("default", "dim", "dims")],
    *[Rule(f"aten::all.{overload}", all_) for overload in ("default", "dim", "dims")],
    Rule("aten::logsumexp.default", logsumexp),
    Rule("aten::cumsum.default", cumsum),
    Rule("aten::count_nonzero.default", count_nonzero),
]
