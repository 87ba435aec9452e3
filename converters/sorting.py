"""Sorting and what follows from it: topk, medians, modes."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import INT32
from onnxplug.converters.helpers.order import at_rank, median_of, ordered_part, sort_axis
from onnxplug.converters.helpers.promotion import comparable
from onnxplug.converters.helpers.reductions import reduce, reduction_dtype
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def topk(g: GraphBuilder, node: FxNode) -> list[Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)

    Where NaN goes is up to the runtime.
    """
    x, k, axis, largest, ordered = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    x = g.cast(x, reduction_dtype(node.dtype))
    values, indices = g.op.TopK(x, g.as_vector(k), axis=axis, largest=int(largest), sorted=int(ordered), _outputs=2)
    return [g.cast(values, node.dtype), indices]


def topk_exact(g: GraphBuilder, node: FxNode) -> list[Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)

    NaN counts as larger than +inf.
    """
    x, k, axis, largest, ordered = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    return ordered_part(g, x, g.as_vector(k), axis, largest, ordered)


def sort(g: GraphBuilder, node: FxNode) -> list[Value]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)

    TopK of all; equal elements keep their order, as ONNX's TopK takes the lower index first.
    """
    named = node.kwargs
    return sort_axis(g, node.args[0], named.get("dim", -1), named.get("descending", False))


def argsort(g: GraphBuilder, node: FxNode) -> Value:
    """argsort(Tensor self, int dim=-1, bool descending=False) -> Tensor"""
    named = node.kwargs
    return sort_axis(g, node.args[0], named.get("dim", -1), named.get("descending", False))[1]


def kthvalue(g: GraphBuilder, node: FxNode) -> list[Value]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)

    NaN counts as larger than everything.
    """
    x, k, axis, keepdim = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    axis = normalize_axis(axis, rank_of(x))
    place = g.op.Sub(g.as_scalar(k), g.const(1))
    return at_rank(g, node, x, axis, keepdim, place)


def median_dim(ignore_nan: bool) -> Converter:
    """median.dim, nanmedian.dim: the lower of the two middle elements. NaN wins, or is left out."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, axis, keepdim = node.args
        if not rank_of(x):
            return [x, g.const(0)]
        axis = normalize_axis(axis, rank_of(x))
        inner = comparable(node.dtype)
        x = g.cast(x, inner)
        value, index = median_of(g, x, axis, ignore_nan)
        results = [g.cast(value, node.dtype), index]
        return results if keepdim else [squeeze(g, v, axis) for v in results]

    convert.__name__ = convert.__qualname__ = "nanmedian_dim" if ignore_nan else "median_dim"
    return convert


def median(ignore_nan: bool) -> Converter:
    """median, nanmedian of all elements; NaN for an empty tensor."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        inner = comparable(node.dtype)
        flat = g.reshape(g.cast(node.args[0], inner), [-1])
        if flat.shape is not None and flat.shape[0] == 0:
            return g.const(float("nan"), node.dtype)
        return g.cast(squeeze(g, median_of(g, flat, 0, ignore_nan)[0], 0), node.dtype)

    convert.__name__ = convert.__qualname__ = "nanmedian" if ignore_nan else "median"
    return convert


def mode(g: GraphBuilder, node: FxNode) -> list[Value]:
    """mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)

    The most frequent element, the smallest of equally frequent ones, and the index of its last occurrence. Every element
    is compared with every other of its row.
    """
    x, axis, keepdim = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    rank = rank_of(x)
    axis = normalize_axis(axis, rank)
    inner = comparable(node.dtype)
    order = [a for a in range(rank) if a != axis] + [axis]
    rows = g.op.Transpose(g.cast(x, inner), perm=order)
    same = g.op.Equal(unsqueeze(g, rows, rank), unsqueeze(g, rows, rank - 1))
    counts = reduce(g, "ReduceSum", g.cast(same, INT32), [rank], False)
    often = g.op.Equal(counts, reduce(g, "ReduceMax", counts, [rank - 1], True))
    top: Any = float("inf") if inner.is_floating_point() else (1 << (inner.bitwidth - 1)) - 1
    value = reduce(g, "ReduceMin", g.op.Where(often, rows, g.const(top, inner)), [rank - 1], True)
    here = g.cast(g.op.Equal(rows, value), INT32)
    index = g.op.ArgMax(here, axis=rank - 1, keepdims=1, select_last_index=1)
    results = [g.cast(value, node.dtype), index]
    if not keepdim:
        return [squeeze(g, v, rank - 1) for v in results]
    back = [order.index(a) for a in range(rank)]
    return [g.op.Transpose(v, perm=back) for v in results]


RULES: list[Rule] = [
    Rule("aten::topk.default", topk_exact, exact=True, reason="NaN is the largest; a few of many cost 3 times as much"),
    Rule("aten::topk.default", topk),
    Rule("aten::sort.default", sort),
    Rule("aten::sort.stable", sort),
    Rule("aten::argsort.default", argsort),
    Rule("aten::argsort.stable", argsort),
    Rule("aten::kthvalue.default", kthvalue),
    Rule("aten::median.default", median(ignore_nan=False)),
    Rule("aten::nanmedian.default", median(ignore_nan=True)),
    Rule("aten::median.dim", median_dim(ignore_nan=False)),
    Rule("aten::nanmedian.dim", median_dim(ignore_nan=True)),
    Rule("aten::mode.default", mode),
]
