"""Searching and ordering: sorted search, medians, modes, unique elements, histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.order import at_rank, count_below, median_of
from onnxplug.converters.helpers.promotion import common_dtype, comparable, operand, operands
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_BOOL, _INT32, _INT64, _FLOAT, _DOUBLE = (
    ir.DataType.BOOL,
    ir.DataType.INT32,
    ir.DataType.INT64,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
)


def bucketize(g: GraphBuilder, node: FxNode) -> Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    x, edges = node.args[:2]
    dtype = comparable(common_dtype(node, 0, 1))
    found = count_below(g, edges, operand(g, x, dtype), node.args[3], dtype)
    return g.cast(found, node.dtype)


def searchsorted(g: GraphBuilder, node: FxNode) -> Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None) -> Tensor"""  # noqa: E501
    edges, x, _, right, side, sorter = node.args
    if sorter is not None:
        edges = g.op.GatherElements(edges, sorter, axis=-1)
    dtype = comparable(common_dtype(node, 0, 1))
    after = right or side == "right"
    return g.cast(count_below(g, edges, operand(g, x, dtype), after, dtype), node.dtype)


def isin(g: GraphBuilder, node: FxNode) -> Value:
    """isin.Tensor_Tensor(Tensor elements, Tensor test_elements, *, bool assume_unique=False, bool invert=False) -> Tensor"""
    x, tested, _, invert = node.args
    dtype = comparable(common_dtype(node, 0, 1), True)
    a, b = operands(g, x, tested, dtype=dtype)
    same = g.op.Equal(unsqueeze(g, a, rank_of(a)), g.reshape(b, [-1]))
    count = reduce(g, "ReduceSum", g.cast(same, _INT64), [rank_of(a)], False)
    found: Value = g.op.Greater(count, g.const(0))
    return g.op.Not(found) if invert else found


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
    """median, nanmedian of everything; NaN of nothing."""

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
    counts = reduce(g, "ReduceSum", g.cast(same, _INT32), [rank], False)
    often = g.op.Equal(counts, reduce(g, "ReduceMax", counts, [rank - 1], True))
    top: Any = float("inf") if inner.is_floating_point() else (1 << (inner.bitwidth - 1)) - 1
    value = reduce(g, "ReduceMin", g.op.Where(often, rows, g.const(top, inner)), [rank - 1], True)
    here = g.cast(g.op.Equal(rows, value), _INT32)
    index = g.op.ArgMax(here, axis=rank - 1, keepdims=1, select_last_index=1)
    results = [g.cast(value, node.dtype), index]
    if not keepdim:
        return [squeeze(g, v, rank - 1) for v in results]
    back = [order.index(a) for a in range(rank)]
    return [g.op.Transpose(v, perm=back) for v in results]


# -- unique ------------------------------------------------------------------------------------------------------------


def unique2(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_unique2(Tensor self, bool sorted=True, bool return_inverse=False, bool return_counts=False) -> (Tensor, Tensor, Tensor)"""
    x = node.args[0]
    inner = _unique_dtype(node.dtype)
    values, _, inverse, counts = g.op.Unique(g.reshape(g.cast(x, inner), [-1]), sorted=1, _outputs=4)
    return _wanted(g, node, values, g.op.Reshape(inverse, g.shape(x)), counts)


def _wanted(g: GraphBuilder, node: FxNode, values: Value, inverse: Value, counts: Value) -> list[Value]:
    """What isn't asked for is empty, as torch has it."""
    nothing = g.const(np.zeros(0, dtype=np.int64))
    results = [g.cast(values, node.dtype), inverse, counts]
    return [
        nothing if i and s is not None and s.shape == (0,) else r
        for i, (r, s) in enumerate(zip(results, node.outputs, strict=True))
    ]


def _unique_dtype(dtype: ir.DataType) -> ir.DataType:
    """The dtypes that ONNX Runtime's Unique has: float, double, int64 and int8."""
    if dtype in (_FLOAT, _DOUBLE, _INT64, ir.DataType.INT8):
        return dtype
    return _FLOAT if dtype.is_floating_point() else _INT64


def unique_dim(g: GraphBuilder, node: FxNode) -> list[Value]:
    """unique_dim(Tensor self, int dim, bool sorted=True, bool return_inverse=False, bool return_counts=False) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    x, axis = node.args[:2]
    inner = _unique_dtype(node.dtype)
    axis = normalize_axis(axis, rank_of(x))
    values, _, inverse, counts = g.op.Unique(g.cast(x, inner), axis=axis, sorted=1, _outputs=4)
    return [g.cast(values, node.dtype), inverse, counts]


def unique_consecutive(g: GraphBuilder, node: FxNode) -> list[Value]:
    """unique_consecutive(Tensor self, bool return_inverse=False, bool return_counts=False, int? dim=None) -> (Tensor, Tensor, Tensor)

    An element begins a run when it differs from the one before.
    """  # noqa: E501
    x, _, _, axis = node.args
    inner = comparable(node.dtype, True)
    source = g.cast(x, inner)
    if axis is None:
        source, axis = g.reshape(source, [-1]), 0
    axis = normalize_axis(axis, rank_of(source))
    rank = rank_of(source)
    if not rank:
        source, rank = unsqueeze(g, source, 0), 1
    place = np.array([axis])
    after = g.op.Slice(source, np.array([1]), np.array([np.iinfo(np.int64).max]), place)
    before = g.op.Slice(source, np.array([0]), np.array([-1]), place)
    changed = g.cast(g.op.Not(g.op.Equal(after, before)), _INT32)
    others = [a for a in range(rank) if a != axis]
    if others:
        changed = reduce(g, "ReduceMax", changed, others, False)
    # The first element begins a run, unless there is none.
    size = g.as_vector(g.dim(source, axis))
    first = g.op.Expand(g.const(1, _INT32), g.op.Min(size, g.const([1])))
    starts = g.op.Concat(first, changed, axis=0)
    places = g.op.Squeeze(g.op.NonZero(starts), g.const([0]))
    values = g.op.Gather(source, places, axis=axis)
    inverse = g.op.Sub(g.op.CumSum(g.cast(starts, _INT64), g.const(0)), g.const(1))
    ends = g.op.Concat(
        g.op.Slice(places, np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0])), size, axis=0
    )
    ends = g.op.Slice(ends, np.array([0]), g.op.Shape(places), np.array([0]))
    counts = g.op.Sub(ends, places)
    if node.args[3] is None:
        inverse = g.op.Reshape(inverse, g.shape(x))
    return _wanted(g, node, values, inverse, counts)


# -- histograms --------------------------------------------------------------------------------------------------------


def _range_of(g: GraphBuilder, x: Value, low: Any, high: Any, widen: float) -> tuple[Value, Value]:
    """The bounds of a histogram: those given, those of the data where both are equal; a single value gets room."""
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

    Bins of equal width; what lies outside, and NaN, is not counted; the upper bound belongs to the last bin.
    """
    x, bins, low, high = node.args
    dtype = _DOUBLE if node.dtype == _DOUBLE else _FLOAT
    x = g.reshape(g.cast(x, dtype), [-1])
    first, last = _range_of(g, x, low, high, 1.0)
    inside = g.op.And(g.op.GreaterOrEqual(x, first), g.op.LessOrEqual(x, last))
    scaled = g.op.Div(g.op.Mul(g.op.Sub(x, first), g.const(float(bins), dtype)), g.op.Sub(last, first))
    place = g.op.Min(g.cast(g.op.Where(inside, scaled, g.const(0.0, dtype)), _INT64), g.const(bins - 1))
    place = g.op.Where(inside, place, g.const(-1))
    hits = g.op.Equal(unsqueeze(g, place, 0), g.const(np.arange(bins, dtype=np.int64).reshape(-1, 1)))
    return g.cast(reduce(g, "ReduceSum", g.cast(hits, dtype), [1], False), node.dtype)


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
    counted = g.cast(hits, dtype)
    if weight is not None:
        counted = g.op.Mul(counted, unsqueeze(g, g.reshape(g.cast(weight, dtype), [-1]), 0))
    sums = reduce(g, "ReduceSum", counted, [1], False)
    if density:
        total = reduce(g, "ReduceSum", sums, None, False)
        sums = g.op.Div(g.op.Div(sums, total), g.op.Sub(high, low))
    return sums


def histogram_count(g: GraphBuilder, node: FxNode) -> list[Value]:
    """histogram.bin_ct(Tensor self, int bins=100, *, float[]? range=None, Tensor? weight=None, bool density=False) -> (Tensor hist, Tensor bin_edges)"""  # noqa: E501
    x, bins, given, weight, density = node.args
    low, high = given if given is not None else (0.0, 0.0)
    edges = _even_edges(g, g.reshape(x, [-1]), bins, low, high)
    return [_histogram(g, node, x, edges, weight, density), edges]


def _even_edges(g: GraphBuilder, x: Value, bins: int, low: float, high: float) -> Value:
    """The edges of bins of equal width."""
    dtype = x.dtype
    assert dtype is not None
    first, last = _range_of(g, x, low, high, 0.5)
    # As torch.linspace: from both ends towards the middle.
    step = g.op.Div(g.op.Sub(last, first), g.const(float(bins), dtype))
    number = np.arange(bins + 1)
    near = g.op.Add(first, g.op.Mul(step, g.const(number.astype(np.float64), dtype)))
    far = g.op.Sub(last, g.op.Mul(step, g.const((bins - number).astype(np.float64), dtype)))
    edges: Value = g.op.Where(g.const(number < (bins + 1) // 2), near, far)
    return edges


def histogram_edges(g: GraphBuilder, node: FxNode) -> list[Value]:
    """histogram.bins_tensor(Tensor self, Tensor bins, *, Tensor? weight=None, bool density=False) -> (Tensor hist, Tensor bin_edges)"""  # noqa: E501
    x, edges, weight, density = node.args
    return [_histogram(g, node, x, edges, weight, density), edges]


def histogramdd_edges(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_histogramdd_bin_edges(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None, bool density=False) -> Tensor[]"""  # noqa: E501
    x, bins, given = node.args[:3]
    return _edges_of_columns(g, x, bins, given)


def _edges_of_columns(g: GraphBuilder, x: Value, bins: Any, given: Any) -> list[Value]:
    columns = g.reshape(x, [-1, len(bins)])
    edges = []
    for number, count in enumerate(bins):
        column = g.op.Gather(columns, g.const(number), axis=1)
        low, high = given[2 * number : 2 * number + 2] if given else (0.0, 0.0)
        edges.append(_even_edges(g, column, count, low, high))
    return edges


def histogramdd_counts(g: GraphBuilder, node: FxNode) -> Value:
    """_histogramdd_from_bin_cts(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None, bool density=False) -> Tensor"""  # noqa: E501
    x, bins, given, weight, density = node.args
    return _histogramdd(g, x, _edges_of_columns(g, x, bins, given), weight, density)


def histogramdd_tensors(g: GraphBuilder, node: FxNode) -> Value:
    """_histogramdd_from_bin_tensors(Tensor self, Tensor[] bins, *, Tensor? weight=None, bool density=False) -> Tensor"""
    x, edges, weight, density = node.args
    return _histogramdd(g, x, edges, weight, density)


def _histogramdd(g: GraphBuilder, x: Value, edges: list[Value], weight: Value | None, density: bool) -> Value:
    """The bin of every point, counted in the flattened grid of bins; points outside fall into one more."""
    dtype = x.dtype
    assert dtype is not None
    columns = g.reshape(x, [-1, len(edges)])
    place: Value = g.const(0)
    outside: Value | None = None
    sizes = []
    for number, edge in enumerate(edges):
        column = g.op.Gather(columns, g.const(number), axis=1)
        count = g.op.Sub(g.as_scalar(g.dim(edge, 0)), g.const(1))
        top = g.op.Gather(edge, g.const(-1), axis=0)
        found = g.op.Sub(count_below(g, edge, column, True, dtype), g.const(1))
        found = g.op.Where(g.op.Equal(column, top), g.op.Sub(count, g.const(1)), found)
        missed = g.op.Or(g.op.Less(found, g.const(0)), g.op.GreaterOrEqual(found, count))
        outside = missed if outside is None else g.op.Or(outside, missed)
        place = g.op.Add(g.op.Mul(place, count), found)
        sizes.append(count)
    assert outside is not None
    total = sizes[0]
    for size in sizes[1:]:
        total = g.op.Mul(total, size)
    place = g.op.Where(outside, g.const(-1), place)
    hits = g.cast(g.op.Equal(unsqueeze(g, g.op.Range(g.const(0), total, g.const(1)), 1), unsqueeze(g, place, 0)), dtype)
    if weight is not None:
        hits = g.op.Mul(hits, unsqueeze(g, g.reshape(g.cast(weight, dtype), [-1]), 0))
    sums = g.op.Reshape(reduce(g, "ReduceSum", hits, [1], False), g.vector(sizes))
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

    As many bins as the largest element asks for.
    """
    x, weights, least = node.args
    x = g.cast(x, _INT64)
    if x.shape is not None and x.shape[0] == 0:
        raise Unsupported("bincount of nothing")
    size = g.op.Max(g.op.Add(reduce(g, "ReduceMax", x, None, False), g.const(1)), g.as_scalar(least))
    hits = g.op.Equal(unsqueeze(g, g.op.Range(g.const(0), size, g.const(1)), 1), unsqueeze(g, x, 0))
    counted = g.cast(hits, node.dtype)
    if weights is not None:
        counted = g.op.Mul(counted, unsqueeze(g, g.cast(weights, node.dtype), 0))
    return reduce(g, "ReduceSum", counted, [1], False)


RULES: list[Rule] = [
    Rule("aten::bucketize.Tensor", bucketize),
    Rule("aten::bucketize.Scalar", bucketize),
    Rule("aten::searchsorted.Tensor", searchsorted),
    Rule("aten::searchsorted.Scalar", searchsorted),
    *[Rule(f"aten::isin.{overload}", isin) for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")],
    Rule("aten::kthvalue.default", kthvalue),
    Rule("aten::median.default", median(ignore_nan=False)),
    Rule("aten::nanmedian.default", median(ignore_nan=True)),
    Rule("aten::median.dim", median_dim(ignore_nan=False)),
    Rule("aten::nanmedian.dim", median_dim(ignore_nan=True)),
    Rule("aten::mode.default", mode),
    Rule("aten::_unique2.default", unique2),
    Rule("aten::unique_dim.default", unique_dim),
    Rule("aten::unique_consecutive.default", unique_consecutive),
    Rule("aten::histc.default", histc),
    Rule("aten::histogram.bin_ct", histogram_count),
    Rule("aten::histogram.bins_tensor", histogram_edges),
    Rule("aten::_histogramdd_bin_edges.default", histogramdd_edges),
    Rule("aten::_histogramdd_from_bin_cts.default", histogramdd_counts),
    Rule("aten::_histogramdd_from_bin_tensors.default", histogramdd_tensors),
    Rule("aten::bincount.default", bincount),
]
