"""Sorting and operators based on it: topk, medians, modes."""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, squeeze
from onnxplug.converters.helpers.dtypes import INT32, INT64
from onnxplug.converters.helpers.order import at_rank, median_of, order, ordered_part, sort_axis
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.scattering import scatter_elements
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def topk(g: GraphBuilder, node: FxNode) -> list[Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)

    The position of NaN depends on the runtime.
    """
    x, k, axis, largest, ordered = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    x = g.cast(x, computed_in(g, "TopK", node.dtype))
    values, indices = g.op.TopK(x, g.as_vector(k), axis=axis, largest=int(largest), sorted=int(ordered), _outputs=2)
    return [g.cast(values, node.dtype), indices]


def topk_exact(g: GraphBuilder, node: FxNode) -> list[Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)

    NaN sorts as the largest value, after +inf.
    """
    x, k, axis, largest, ordered = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    return ordered_part(g, x, g.as_vector(k), axis, largest, ordered)


def sort(g: GraphBuilder, node: FxNode) -> list[Value]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)

    TopK of all elements; equal elements keep index order, which ONNX's TopK guarantees.
    """
    named = node.kwargs
    return sort_axis(g, node.args[0], named.get("dim", -1), named.get("descending", False))


def argsort(g: GraphBuilder, node: FxNode) -> Value:
    """argsort(Tensor self, int dim=-1, bool descending=False) -> Tensor"""
    named = node.kwargs
    return sort_axis(g, node.args[0], named.get("dim", -1), named.get("descending", False))[1]


def kthvalue(g: GraphBuilder, node: FxNode) -> list[Value]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)

    NaN sorts as the largest value.
    """
    x, k, axis, keepdim = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    axis = normalize_axis(axis, rank_of(x))
    place = g.op.Sub(g.as_scalar(k), g.const(1))
    return at_rank(g, node, x, axis, keepdim, place)


def median_dim(ignore_nan: bool) -> Converter:
    """median.dim, nanmedian.dim: the lower of the two middle elements.

    For median NaN propagates; nanmedian ignores it.
    """

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, axis, keepdim = node.args
        if not rank_of(x):
            return [x, g.const(0)]
        axis = normalize_axis(axis, rank_of(x))
        x = g.cast(x, computed_in(g, "TopK Where", node.dtype))
        value, index = median_of(g, x, axis, ignore_nan)
        results = [g.cast(value, node.dtype), index]
        return results if keepdim else [squeeze(g, v, axis) for v in results]

    convert.__name__ = convert.__qualname__ = "nanmedian_dim" if ignore_nan else "median_dim"
    return convert


def median(ignore_nan: bool) -> Converter:
    """median, nanmedian of all elements; NaN for an empty tensor."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        inner = computed_in(g, "TopK Where", node.dtype)
        x = g.cast(node.args[0], inner)
        flat = g.reshape(x, [-1])
        if flat.shape is not None and flat.shape[0] == 0:
            return g.const(float("nan"), node.dtype)
        if flat.shape is None or not isinstance(flat.shape[0], int):
            # NaN is the only element where there is none.
            nothing = g.cast(g.op.Equal(g.op.Shape(flat), g.const([0])), INT64)
            flat = g.op.Concat(flat, g.op.Expand(g.cast(g.const(float("nan"), node.dtype), inner), nothing), axis=0)
        return g.cast(squeeze(g, median_of(g, flat, 0, ignore_nan)[0], 0), node.dtype)

    convert.__name__ = convert.__qualname__ = "nanmedian" if ignore_nan else "median"
    return convert


def mode(g: GraphBuilder, node: FxNode) -> list[Value]:
    """mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)

    The most frequent element, the smallest among equally frequent elements, and the index of its last occurrence: the longest run
    of equal elements in ascending order.
    """
    x, axis, keepdim = node.args
    if not rank_of(x):
        return [x, g.const(0)]
    axis = normalize_axis(axis, rank_of(x))
    x = g.cast(x, computed_in(g, "TopK Equal", node.dtype))
    places = order(g, x, g.as_vector(g.dim(x, axis)), axis, largest=False)
    ascending = g.op.GatherElements(x, places, axis=axis)
    run = _run_numbers(g, ascending, axis)
    zeros, ones = (g.op.Expand(g.const(number), g.shape(x)) for number in (0, 1))
    lengths = scatter_elements(g, zeros, axis, run, ones, "add")
    longest = g.op.ArgMax(lengths, axis=axis, keepdims=1)
    inside = g.cast(g.op.Equal(run, longest), INT32)
    last = g.op.ArgMax(inside, axis=axis, keepdims=1, select_last_index=1)
    results = [g.cast(g.op.GatherElements(ascending, last, axis=axis), node.dtype)]
    results.append(g.op.GatherElements(places, last, axis=axis))
    return results if keepdim else [squeeze(g, v, axis) for v in results]


def _run_numbers(g: GraphBuilder, x: Value, axis: int) -> Value:
    """For each element of an axis the number of the run of equal elements that it lies in."""
    place, end = np.array([axis]), np.array([np.iinfo(np.int64).max])
    first = g.op.Slice(x, np.array([0]), np.array([1]), place)
    after, before = g.op.Slice(x, np.array([1]), end, place), g.op.Slice(x, np.array([0]), np.array([-1]), place)
    changed = g.cast(g.op.Not(g.op.Equal(after, before)), INT64)
    zero = g.op.Expand(g.const(0), g.op.Shape(first))
    return g.op.CumSum(g.op.Concat(zero, changed, axis=axis), g.const(axis))


RULES: list[Rule] = [
    Rule(
        "aten::topk.default",
        topk_exact,
        exact=True,
        reason="NaN sorts as the largest value; taking a few of many elements costs 3 times as much",
    ),
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
