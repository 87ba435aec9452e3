"""Reductions along axes and of everything."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axes, normalize_axis, rank_of
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, INT64
from onnxplug.converters.helpers.exactness import (
    SKIPS_NAN,
    THROUGH_DOUBLE,
    WRONG_AND_SLOW,
    of_floats,
    of_wide_integers,
    sums_integers,
)
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import in_rows, is_long, log_of_sum, reduce, reduced
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.slices import diagonal_of
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def whole(op_type: str, exact: bool = False) -> Converter:
    """A reduction of all elements: sum, mean, prod, amax …"""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        return reduced(g, op_type, node.args[0], None, False, node.dtype, exact)

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}_all{'_exact' if exact else ''}"
    return convert


def along(op_type: str, exact: bool = False) -> Converter:
    """A reduction along axes: ``(x, dim, keepdim, …)``."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axes, keepdim = node.args[:3]
        if op_type == "ReduceProd" and isinstance(axes, Value):
            raise Unsupported("prod over a dynamic axis")
        return reduced(g, op_type, x, axes, keepdim, node.dtype, exact)

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}_dim{'_exact' if exact else ''}"
    return convert


def mean_of_planes(g: GraphBuilder, node: FxNode) -> Value:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor

    The mean over height and width of a convolution's result, both kept: a global pool.
    """
    if is_long(g, node.args[0], [2, 3]):
        raise Decline("so many elements are summed in steps")
    return g.op.GlobalAveragePool(node.args[0])


#: The operators that are common between a convolution and the mean of its planes.
_ELEMENTWISE = frozenset({"Add", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Relu", "Sigmoid"})


def _of_convolved_planes(node: FxNode) -> bool:
    """Whether a mean is of a convolution's planes, up to four elementwise operators later."""
    x, axes, keepdim = node.args[:3]
    if not keepdim or x.dtype != FLOAT or node.dtype != FLOAT or rank_of(x) != 4 or not isinstance(axes, list | tuple):
        return False
    if sorted(a % 4 for a in axes if isinstance(a, int)) != [2, 3]:
        return False
    producer = x.producer()
    for _ in range(4):
        if producer is None or producer.op_type not in _ELEMENTWISE:
            break
        producer = producer.inputs[0].producer() if producer.inputs[0] is not None else None
    return producer is not None and producer.op_type in ("Conv", "BatchNormalization") and not producer.domain


def any_(g: GraphBuilder, node: FxNode) -> Value:
    """any(Tensor self) -> Tensor"""
    return _truth(g, node, "ReduceMax")


def all_(g: GraphBuilder, node: FxNode) -> Value:
    """all(Tensor self) -> Tensor"""
    return _truth(g, node, "ReduceMin")


def _truth(g: GraphBuilder, node: FxNode, op_type: str) -> Value:
    """The largest or smallest of the truth values; of no elements ``any`` is false and ``all`` true, as in ONNX."""
    x, axes, keepdim = _truth_values(g, node)
    result = x if axes == [] else reduce(g, op_type, x, axes, keepdim)
    return g.cast(result, node.dtype)


def _truth_values(g: GraphBuilder, node: FxNode) -> tuple[Value, list[int] | None, bool]:
    """The truth values, and which axes are reduced; unlike for sums, an empty list of axes reduces nothing."""
    x = node.args[0]
    axes, keepdim = (node.args[1], node.args[2]) if len(node.args) > 2 else (None, False)
    rank = rank_of(x)
    over = [] if axes == [] else normalize_axes(axes, rank) if rank else None
    return g.cast(x, BOOL), over, keepdim


def any_by_count(g: GraphBuilder, node: FxNode) -> Value:
    """any(Tensor self) -> Tensor"""
    return g.cast(_some(g, *_truth_values(g, node)), node.dtype)


def all_by_count(g: GraphBuilder, node: FxNode) -> Value:
    """all(Tensor self) -> Tensor"""
    x, axes, keepdim = _truth_values(g, node)
    return g.cast(g.op.Not(_some(g, g.op.Not(x), axes, keepdim)), node.dtype)


def _some(g: GraphBuilder, x: Value, axes: list[int] | None, keepdim: bool) -> Value:
    """Whether some value is true: the sum of the values in float is not 0; no sum of ones is rounded to 0."""
    if axes == []:
        return x
    return g.op.Greater(reduce(g, "ReduceSum", g.cast(x, FLOAT), axes, keepdim), g.const(0.0))


def arg_extremum(op_type: str, exact: bool = False) -> Converter:
    """argmax, argmin: the index of the first of equal elements; with ``exact`` of the first NaN, if there is one.

    Without an axis, the index into the flattened tensor.
    """

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axis, keepdim = node.args
        x = g.cast(x, computed_in(g, op_type, x.dtype))
        rank = rank_of(x)
        if not rank:
            return g.const(0)
        if axis is None:
            index = _first_extremum(g, op_type, g.reshape(x, [-1]), 0, False, exact)
            return g.reshape(index, [1] * rank) if keepdim else index
        return _first_extremum(g, op_type, x, normalize_axis(axis, rank), keepdim, exact)

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}{'_exact' if exact else ''}"
    return convert


def _first_extremum(g: GraphBuilder, op_type: str, x: Value, axis: int, keepdim: bool, exact: bool) -> Value:
    keep = int(keepdim)
    index: Value = getattr(g.op, op_type)(x, axis=axis, keepdims=keep)
    if not exact:
        return index
    flags = g.cast(g.op.IsNaN(x), FLOAT)
    first = g.op.ArgMax(flags, axis=axis, keepdims=keep)
    some = g.cast(reduce(g, "ReduceMax", flags, [axis], keepdim), BOOL)
    return g.op.Where(some, first, index)


def extremum_dim(op_type: str, exact: bool = False) -> Converter:
    """max.dim, min.dim: values, and the index of the first of equal elements."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, axis, keepdim = node.args
        if not rank_of(x):
            return [x, g.const(0)]
        axis = normalize_axis(axis, rank_of(x))
        values = reduced(g, f"Reduce{op_type}", x, axis, keepdim, x.dtype, exact)
        x = g.cast(x, computed_in(g, f"Arg{op_type}", x.dtype))
        indices = _first_extremum(g, f"Arg{op_type}", x, axis, keepdim, exact)
        return [values, indices]

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}_dim{'_exact' if exact else ''}"
    return convert


def logsumexp(g: GraphBuilder, node: FxNode) -> Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    x, axes, keepdim = node.args
    x = g.cast(x, wide(node.dtype))
    rank = rank_of(x)
    over = normalize_axes(axes, rank) if rank else None
    return g.cast(log_of_sum(g, x, over, keepdim), node.dtype)


def cumsum(g: GraphBuilder, node: FxNode) -> Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    x, axis = node.args[:2]
    if not rank_of(x):
        return g.cast(x, node.dtype)
    inner = computed_in(g, "CumSum", wide(node.dtype))
    x, axis = g.cast(x, inner), axis % rank_of(x)
    size = g.dim(x, axis)
    if isinstance(size, int) and is_long(g, x, [axis]):
        return g.cast(_long_cumsum(g, x, axis, size), node.dtype)
    return g.cast(g.op.CumSum(x, g.const(axis)), node.dtype)


def _long_cumsum(g: GraphBuilder, x: Value, axis: int, size: int) -> Value:
    """The sums within rows, plus the sum of the rows before."""
    sums = g.op.CumSum(in_rows(g, x, axis, size), g.const(axis + 1))
    before = g.op.CumSum(g.op.Gather(sums, g.const([-1]), axis=axis + 1), g.const(axis), exclusive=1)
    sizes = g.dims(x)
    sums = g.reshape(g.op.Add(sums, before), [*sizes[:axis], -1, *sizes[axis + 1 :]])
    return g.op.Slice(sums, g.const([0]), g.const([size]), g.const([axis]))


def count_nonzero(g: GraphBuilder, node: FxNode) -> Value:
    """count_nonzero(Tensor self, int? dim=None) -> Tensor"""
    x = node.args[0]
    return reduced(g, "ReduceSum", g.cast(x, BOOL), node.args[1], False, INT64, exact=True)


def aminmax(g: GraphBuilder, node: FxNode) -> list[Value]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)"""
    x, axis, keepdim = node.args
    return [reduced(g, f"Reduce{end}", x, axis, keepdim, x.dtype) for end in ("Min", "Max")]


def aminmax_exact(g: GraphBuilder, node: FxNode) -> list[Value]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)

    NaN propagates.
    """
    x, axis, keepdim = node.args
    return [reduced(g, f"Reduce{end}", x, axis, keepdim, x.dtype, exact=True) for end in ("Min", "Max")]


def trace(g: GraphBuilder, node: FxNode) -> Value:
    """trace(Tensor self) -> Tensor"""
    return reduced(g, "ReduceSum", diagonal_of(g, node.args[0], 0, 0, 1), None, False, node.dtype)


def trace_exact(g: GraphBuilder, node: FxNode) -> Value:
    """trace(Tensor self) -> Tensor"""
    return reduced(g, "ReduceSum", diagonal_of(g, node.args[0], 0, 0, 1), None, False, node.dtype, exact=True)


_COUNTED: dict[str, Any] = {
    "target": "onnxruntime",
    "reason": "its ReduceSum of floats is faster than its reductions of bools",
}
#: The exact forms, of integers and of floats.
_INTEGER_SUMS: dict[str, Converter] = {
    "sum.default": whole("ReduceSum", exact=True),
    "sum.dim_IntList": along("ReduceSum", exact=True),
    "trace.default": trace_exact,
}
_INTEGER_PRODUCTS: dict[str, Converter] = {
    "prod.default": whole("ReduceProd", exact=True),
    "prod.dim_int": along("ReduceProd", exact=True),
}
_EXTREMA: dict[str, Converter] = {
    "amax.default": along("ReduceMax", exact=True),
    "amin.default": along("ReduceMin", exact=True),
    "max.default": whole("ReduceMax", exact=True),
    "min.default": whole("ReduceMin", exact=True),
    "max.dim": extremum_dim("Max", exact=True),
    "min.dim": extremum_dim("Min", exact=True),
    "aminmax.default": aminmax_exact,
    "argmax.default": arg_extremum("ArgMax", exact=True),
    "argmin.default": arg_extremum("ArgMin", exact=True),
}
RULES: list[Rule] = [
    Rule("aten::sum.default", whole("ReduceSum")),
    Rule("aten::trace.default", trace),
    Rule("aten::sum.dim_IntList", along("ReduceSum")),
    Rule("aten::mean.default", whole("ReduceMean")),
    Rule("aten::mean.dim", along("ReduceMean")),
    Rule(
        "aten::mean.dim",
        mean_of_planes,
        target="onnxruntime",
        when=_of_convolved_planes,
        reason="ONNX Runtime lays convolved tensors out in blocks of channels, which a global pool reads as they are",
    ),
    Rule("aten::prod.default", whole("ReduceProd")),
    Rule("aten::prod.dim_int", along("ReduceProd")),
    Rule("aten::amax.default", along("ReduceMax")),
    Rule("aten::amin.default", along("ReduceMin")),
    Rule("aten::max.default", whole("ReduceMax")),
    Rule("aten::min.default", whole("ReduceMin")),
    Rule("aten::max.dim", extremum_dim("Max")),
    Rule("aten::min.dim", extremum_dim("Min")),
    Rule("aten::aminmax.default", aminmax),
    Rule("aten::argmax.default", arg_extremum("ArgMax")),
    Rule("aten::argmin.default", arg_extremum("ArgMin")),
    *[
        Rule(f"aten::{name}.{overload}", convert, opset=opset, **conditions)
        for name, plain, counted in (("any", any_, any_by_count), ("all", all_, all_by_count))
        for overload in ("default", "dim", "dims")
        for convert, opset, conditions in (
            (plain, (20, None), {}),  # reductions of bools
            (counted, (None, 19), {}),
            (counted, (20, None), _COUNTED),
        )
    ],
    Rule("aten::logsumexp.default", logsumexp),
    Rule("aten::cumsum.default", cumsum),
    Rule("aten::count_nonzero.default", count_nonzero),
    *[Rule(f"aten::{op}", convert, when=sums_integers, **WRONG_AND_SLOW) for op, convert in _INTEGER_SUMS.items()],
    *[
        Rule(f"aten::{op}", convert, when=of_wide_integers, **THROUGH_DOUBLE)
        for op, convert in _INTEGER_PRODUCTS.items()
    ],
    *[Rule(f"aten::{op}", convert, when=of_floats, **SKIPS_NAN) for op, convert in _EXTREMA.items()],
]
