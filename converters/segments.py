"""Reductions of runs of rows: embedding bags and segments."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, INT64
from onnxplug.converters.helpers.fill import filled
from onnxplug.converters.helpers.grids import iota
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.results import wanted
from onnxplug.converters.helpers.scattering import neutral, run_of_each, scatter_rows
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_MOST = np.iinfo(np.int64).max


def embedding_bag_padding(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """embedding_bag.padding_idx(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq, int mode, bool sparse, Tensor? per_sample_weights, bool include_last_offset, int? padding_idx) -> (Tensor, Tensor, Tensor, Tensor)

    A negative padding index counts from the table's end.
    """  # noqa: E501
    weight, indices, offsets, _, mode, _, weights, include_last, padding = node.args
    if padding is not None and padding < 0:
        padding += g.concrete_shape(weight, "embedding table")[0]
    return _embedding_bag(g, node, weight, indices, offsets, mode, weights, include_last, padding)


def embedding_bag(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    weight, indices, offsets, _, mode, _, weights, include_last = node.args
    return _embedding_bag(g, node, weight, indices, offsets, mode, weights, include_last, None)


def embedding_bag_forward(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_embedding_bag_forward_only(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1) -> (Tensor, Tensor, Tensor, Tensor)

    In this overload a padding index of -1 means that there is none.
    """  # noqa: E501
    weight, indices, offsets, _, mode, _, weights, include_last, padding = node.args
    none = padding is None or padding < 0
    return _embedding_bag(g, node, weight, indices, offsets, mode, weights, include_last, None if none else padding)


def _embedding_bag(
    g: GraphBuilder,
    node: FxNode,
    weight: Value,
    indices: Value,
    offsets: Value,
    mode: int,
    weights: Value | None,
    include_last: bool,
    padding: int | None,
) -> list[Value | None]:
    """Sums, means or maxima (mode 0, 1, 2) of the rows of each bag.

    An empty bag is 0. Rows that the padding index names do not count. weight [rows, width], indices [items], offsets [bags],
    or [bags + 1] with the end. In eager PyTorch, items after that last offset belong to the last bag, except in
    its fast sums (no padding index, not double), which exclude them; a fast mean excludes them from the sum, but not
    from the count.
    """
    dtype = wide(node.dtype)
    indices, offsets = g.cast(indices, INT64), g.cast(offsets, INT64)
    starts = g.op.Slice(offsets, np.array([0]), np.array([-1]), np.array([0])) if include_last else offsets
    bags = g.as_scalar(g.dim(starts, 0))
    run = counted = run_of_each(g, starts, g.dim(indices, 0))
    # One more bag takes the rows that belong to none.
    if padding is not None:
        counted = g.op.Where(g.op.Equal(indices, g.const(padding)), bags, counted)
    taken = counted
    if include_last and padding is None and mode != 2 and node.dtype != DOUBLE:
        item = g.op.Range(g.const(0), g.as_scalar(g.dim(indices, 0)), g.const(1))
        taken = g.op.Where(g.op.Less(item, g.op.Gather(offsets, g.const([-1]))), counted, bags)
    rows = g.cast(g.op.Gather(weight, indices, axis=0), dtype)
    if weights is not None:
        rows = g.op.Mul(rows, unsqueeze(g, g.cast(weights, dtype), 1))

    result = _of_bags(g, rows, taken, bags, "amax" if mode == 2 else "sum", dtype)
    sizes = largest = None
    if mode:
        ones = g.op.Expand(g.const(1), g.op.Shape(indices))
        sizes = _of_bags(g, ones, counted, bags, "sum", INT64)
        column = unsqueeze(g, sizes, 1)
        if mode == 1:
            result = g.op.Div(result, g.cast(g.op.Max(column, g.const(1)), dtype))
        else:
            result = g.op.Where(g.op.Equal(column, g.const(0)), g.const(0.0, dtype), result)
    if mode == 2 and wanted(node, 3):
        largest = _first_largest(g, rows, result, indices, counted, bags)
    return [g.cast(result, node.dtype), *_for_backward(g, node, run, sizes, largest)]


def _of_bags(g: GraphBuilder, values: Value, places: Value, bags: Value, reduction: str, dtype: ir.DataType) -> Value:
    """The rows of each bag reduced; rows after the last bag are left out. NaN does not beat numbers, as in torch."""
    reduced = scatter_rows(g, values, places, g.op.Add(bags, g.const(1)), reduction, dtype, nan=False)
    return g.op.Slice(reduced, np.array([0]), np.array([-1]), np.array([0]))


def _first_largest(g: GraphBuilder, rows: Value, result: Value, indices: Value, counted: Value, bags: Value) -> Value:
    """The index of the first row with each maximum, [bags, width]: the least number of an item that equals its bag's result."""
    item = unsqueeze(g, iota(g, g.dim(indices, 0)), 1)
    hit = g.op.Equal(rows, g.op.Gather(result, g.op.Min(counted, g.op.Sub(bags, g.const(1))), axis=0))
    first = _of_bags(g, g.op.Where(hit, item, g.const(_MOST)), counted, bags, "amin", INT64)
    none = g.op.Equal(first, g.const(_MOST))
    return g.op.Where(none, g.const(0), g.op.Gather(indices, g.op.Where(none, g.const(0), first), axis=0))


def _for_backward(
    g: GraphBuilder, node: FxNode, run: Value, sizes: Value | None, largest: Value | None
) -> list[Value | None]:
    """The bag of each item, the bags' sizes (0 for sums), and the rows of the maxima (the sizes for sums and means).

    Results that torch leaves empty are empty, and results that nobody reads are left out.
    """
    results: list[Value | None] = []
    for place, known in ((1, run), (2, sizes), (3, largest or sizes)):
        output = node.outputs[place]
        if output is None or not wanted(node, place):
            results.append(None)
        elif output.shape[0] == 0 or known is None:
            sizes_of_it = [g.size(d) for d in output.shape]
            results.append(filled(g, 0, sizes_of_it, output.dtype))
        else:
            results.append(g.cast(known, output.dtype))
    return results


def segment_reduce(g: GraphBuilder, node: FxNode) -> Value:
    """segment_reduce(Tensor data, str reduce, *, Tensor? lengths=None, Tensor? indices=None, Tensor? offsets=None, int axis=0, bool unsafe=False, Scalar? initial=None) -> Tensor

    The result of an empty segment is the initial value, or else the reduction's neutral value; NaN for a mean.
    """  # noqa: E501
    x, reduction, lengths, _, offsets, axis, _, initial = node.args
    segments = lengths if lengths is not None else offsets
    if axis != 0 or segments is None or rank_of(segments) != 1:
        raise Unsupported("segment_reduce along another axis than the first, or of several rows of segments")
    dtype = wide(node.dtype)
    x, segments = g.cast(x, dtype), g.cast(segments, INT64)
    if lengths is not None:
        ends = g.op.CumSum(segments, g.const(0))
        starts = g.op.Sub(ends, segments)
    else:
        starts = g.op.Slice(segments, np.array([0]), np.array([-1]), np.array([0]))
        ends = g.op.Slice(segments, np.array([1]), np.array([_MOST]), np.array([0]))
    # An extra segment takes the rows after the last segment.
    count = g.as_scalar(g.dim(starts, 0))
    bounds = g.op.Concat(starts, g.op.Slice(ends, np.array([-1]), np.array([_MOST]), np.array([0])), axis=0)
    segment = run_of_each(g, bounds, g.dim(x, 0))
    name = {"mean": "sum", "max": "amax", "min": "amin"}.get(reduction, reduction)
    result = scatter_rows(g, x, segment, g.op.Add(count, g.const(1)), name, dtype)
    result = g.op.Slice(result, np.array([0]), np.array([-1]), np.array([0]))
    start = float(initial) if initial is not None else neutral(name, dtype)
    if start != neutral(name, dtype):
        combine = {"sum": "Add", "prod": "Mul", "amax": "Max", "amin": "Min"}[name]
        result = getattr(g.op, combine)(result, g.const(start, dtype))
    if reduction == "mean":
        count = g.cast(g.op.Sub(ends, starts), dtype)
        for axis_ in range(1, rank_of(x)):
            count = unsqueeze(g, count, axis_)
        empty = g.op.Equal(count, g.const(0.0, dtype))
        whole = g.op.Div(result, count)
        fallback = g.const(start if initial is not None else float("nan"), dtype)
        result = g.op.Where(empty, fallback, whole)
    return g.cast(result, node.dtype)


RULES: list[Rule] = [
    Rule("aten::embedding_bag.default", embedding_bag),
    Rule("aten::embedding_bag.padding_idx", embedding_bag_padding),
    Rule("aten::_embedding_bag_forward_only.default", embedding_bag_forward),
    Rule("aten::_embedding_bag.default", embedding_bag_forward),
    Rule("aten::segment_reduce.default", segment_reduce),
]
