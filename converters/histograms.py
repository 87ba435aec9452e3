"""Histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.order import count_below
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.scattering import scatter_rows
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _range_of(g: GraphBuilder, x: Value, low: Any, high: Any, widen: float) -> tuple[Value, Value]:
    """The bounds of a histogram: the given bounds, or the data's where both are equal; a single value gets room."""
    dtype = x.dtype
    assert dtype is not None
    if low != high:
        return g.const(low, dtype), g.const(high, dtype)
    some = x.shape is None or 0 not in list(x.shape)
    if some:
        low, high = (reduce(g, f"Reduce{end}", x, None, False) for end in ("Min", "Max"))
    else:
        low, high = g.const(low, dtype), g.const(high, dtype)
    flat = g.op.Equal(low, high)
    room = g.const(widen, dtype)
    return g.op.Where(flat, g.op.Sub(low, room), low), g.op.Where(flat, g.op.Add(high, room), high)


def histc(g: GraphBuilder, node: FxNode) -> Value:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor

    Bins of equal width; elements outside, and NaN, are not counted; the upper bound belongs to the last bin.
    """
    x, bins, low, high = node.args
    dtype = DOUBLE if node.dtype == DOUBLE else FLOAT
    x = g.reshape(g.cast(x, dtype), [-1])
    first, last = _range_of(g, x, low, high, 1.0)
    inside = g.op.And(g.op.GreaterOrEqual(x, first), g.op.LessOrEqual(x, last))
    scaled = g.op.Div(g.op.Mul(g.op.Sub(x, first), g.const(float(bins), dtype)), g.op.Sub(last, first))
    place = g.op.Min(g.cast(g.op.Where(inside, scaled, g.const(0.0, dtype)), INT64), g.const(bins - 1))
    return g.cast(scatter_rows(g, g.cast(inside, INT64), place, bins, "sum", INT64), node.dtype)


def _histogram(g: GraphBuilder, node: FxNode, x: Value, edges: Value, weight: Value | None, density: bool) -> Value:
    """Counts, or sums of weights, between ascending edges; the last edge belongs to the last bin."""
    dtype = edges.dtype
    assert dtype is not None
    flat = g.reshape(x, [-1])
    low = g.op.Slice(edges, np.array([0]), np.array([-1]), np.array([0]))
    high = g.op.Slice(edges, np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0]))
    item = unsqueeze(g, flat, 0)
    column_low, column_high = unsqueeze(g, low, 1), unsqueeze(g, high, 1)
    top = g.op.Gather(edges, g.const(-1), axis=0)
    is_last = g.op.And(g.op.Equal(column_high, top), g.op.Equal(item, top))
    hits = g.op.And(g.op.GreaterOrEqual(item, column_low), g.op.Or(g.op.Less(item, column_high), is_last))
    if weight is None:
        counted = g.cast(hits, dtype)
    else:
        counted = g.op.Where(hits, unsqueeze(g, g.reshape(g.cast(weight, dtype), [-1]), 0), g.const(0.0, dtype))
    sums = reduce(g, "ReduceSum", counted, [1], False)
    if density:
        total = reduce(g, "ReduceSum", sums, None, False)
        sums = g.op.Div(g.op.Div(sums, total), g.op.Sub(high, low))
    return sums


def histogram_count(g: GraphBuilder, node: FxNode) -> list[Value]:
    """histogram.bin_ct(Tensor self, int bins=100, *, float[]? range=None, Tensor? weight=None, bool density=False) -> (Tensor hist, Tensor bin_edges)"""  # noqa: E501
    x, bins, bounds, weight, density = node.args
    low, high = bounds if bounds is not None else (0.0, 0.0)
    edges = _even_edges(g, g.reshape(x, [-1]), bins, low, high)
    return [_histogram(g, node, x, edges, weight, density), edges]


def _even_edges(g: GraphBuilder, x: Value, bins: int, low: float, high: float) -> Value:
    """The edges of bins of equal width."""
    dtype = x.dtype
    assert dtype is not None
    first, last = _range_of(g, x, low, high, 0.5)
    # Computed from both ends towards the middle, as torch.linspace does.
    step = g.op.Div(g.op.Sub(last, first), g.const(float(bins), dtype))
    number = np.arange(bins + 1)
    near = g.op.Add(first, g.op.Mul(step, g.const(number.astype(np.float64), dtype)))
    far = g.op.Sub(last, g.op.Mul(step, g.const((bins - number).astype(np.float64), dtype)))
    return g.op.Where(g.const(number < (bins + 1) // 2), near, far)


def histogram_edges(g: GraphBuilder, node: FxNode) -> list[Value]:
    """histogram.bins_tensor(Tensor self, Tensor bins, *, Tensor? weight=None, bool density=False) -> (Tensor hist, Tensor bin_edges)"""  # noqa: E501
    x, edges, weight, density = node.args
    return [_histogram(g, node, x, edges, weight, density), edges]


def histogramdd_edges(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_histogramdd_bin_edges(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None, bool density=False) -> Tensor[]"""  # noqa: E501
    x, bins, bounds = node.args[:3]
    return _edges_of_columns(g, x, bins, bounds)


def _edges_of_columns(g: GraphBuilder, x: Value, bins: Any, bounds: Any) -> list[Value]:
    columns = g.reshape(x, [-1, len(bins)])
    edges = []
    for number, count in enumerate(bins):
        column = g.op.Gather(columns, g.const(number), axis=1)
        low, high = bounds[2 * number : 2 * number + 2] if bounds else (0.0, 0.0)
        edges.append(_even_edges(g, column, count, low, high))
    return edges


def histogramdd_counts(g: GraphBuilder, node: FxNode) -> Value:
    """_histogramdd_from_bin_cts(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None, bool density=False) -> Tensor"""  # noqa: E501
    x, bins, bounds, weight, density = node.args
    return _histogramdd(g, x, _edges_of_columns(g, x, bins, bounds), weight, density)


def histogramdd_tensors(g: GraphBuilder, node: FxNode) -> Value:
    """_histogramdd_from_bin_tensors(Tensor self, Tensor[] bins, *, Tensor? weight=None, bool density=False) -> Tensor"""
    x, edges, weight, density = node.args
    return _histogramdd(g, x, edges, weight, density)


def _histogramdd(g: GraphBuilder, x: Value, edges: list[Value], weight: Value | None, density: bool) -> Value:
    """The bin of every point, counted in the flattened grid of bins; points outside fall into an extra bin."""
    dtype = x.dtype
    assert dtype is not None
    columns = g.reshape(x, [-1, len(edges)])
    place = g.const(0)
    outside: Value | None = None
    sizes = []
    for number, edge in enumerate(edges):
        column = g.op.Gather(columns, g.const(number), axis=1)
        count = g.op.Sub(g.as_scalar(g.dim(edge, 0)), g.const(1))
        top = g.op.Gather(edge, g.const(-1), axis=0)
        bins = g.op.Sub(count_below(g, edge, column, True, dtype), g.const(1))
        bins = g.op.Where(g.op.Equal(column, top), g.op.Sub(count, g.const(1)), bins)
        missed = g.op.Or(g.op.Less(bins, g.const(0)), g.op.GreaterOrEqual(bins, count))
        outside = missed if outside is None else g.op.Or(outside, missed)
        place = g.op.Add(g.op.Mul(place, count), bins)
        sizes.append(count)
    assert outside is not None
    total = sizes[0]
    for size in sizes[1:]:
        total = g.op.Mul(total, size)
    kept = g.cast(g.op.Not(outside), dtype)
    if weight is not None:
        kept = g.op.Where(outside, g.const(0.0, dtype), g.reshape(g.cast(weight, dtype), [-1]))
    place = g.op.Where(outside, g.const(0), place)
    sums = g.op.Reshape(scatter_rows(g, kept, place, total, "sum", dtype), g.vector(sizes))
    if not density:
        return sums
    sums = g.op.Div(sums, reduce(g, "ReduceSum", sums, None, False))
    for number, edge in enumerate(edges):
        low = g.op.Slice(edge, np.array([0]), np.array([-1]), np.array([0]))
        high = g.op.Slice(edge, np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0]))
        width = g.op.Sub(high, low)
        shape = [-1 if a == number else 1 for a in range(len(edges))]
        sums = g.op.Div(sums, g.op.Reshape(width, g.const(shape)))
    return sums


def bincount(g: GraphBuilder, node: FxNode) -> Value:
    """bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor

    The largest element determines the number of bins.
    """
    x, weights, least = node.args
    x = g.cast(x, INT64)
    if x.shape is not None and x.shape[0] == 0:
        raise Unsupported("bincount of an empty tensor")
    size = g.op.Max(g.op.Add(reduce(g, "ReduceMax", x, None, False), g.const(1)), g.as_scalar(least))
    counted = weights if weights is not None else g.op.Expand(g.const(1, node.dtype), g.op.Shape(x))
    return scatter_rows(g, counted, x, size, "sum", node.dtype)


RULES: list[Rule] = [
    Rule("aten::histc.default", histc),
    Rule("aten::histogram.bin_ct", histogram_count),
    Rule("aten::histogram.bins_tensor", histogram_edges),
    Rule("aten::_histogramdd_bin_edges.default", histogramdd_edges),
    Rule("aten::_histogramdd_from_bin_cts.default", histogramdd_counts),
    Rule("aten::_histogramdd_from_bin_tensors.default", histogramdd_tensors),
    Rule("aten::bincount.default", bincount),
]
