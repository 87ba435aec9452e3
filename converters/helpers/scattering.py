"""Scattering with a reduction.

By ScatterElements since the opset that has reductions, before that by a comparison with every place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, INT32, INT64
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import reduced
from onnxplug.converters.helpers.runtimes import computed_in

#: torch's names of reductions to ONNX's.
REDUCTIONS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}
#: Opset from which ScatterElements and ScatterND have a reduction.
_SINCE = {"none": 13, "add": 16, "mul": 16, "max": 18, "min": 18}
_COMBINE = {
    "add": ("ReduceSum", "Add", "sum"),
    "mul": ("ReduceProd", "Mul", "prod"),
    "max": ("ReduceMax", "Max", "amax"),
    "min": ("ReduceMin", "Min", "amin"),
}


def _by_hits(g: GraphBuilder, x: Value, places: Value, source: Value, reduction: str) -> Value:
    """A scatter with a reduction for opsets without ONNX's: each element of ``x`` against every place that is written.

    Args:
        g: The builder.
        x: The tensor, in a dtype that reduces.
        places: Where each element of the source goes in the flattened tensor.
        source: The elements.
        reduction: ``add``, ``mul``, ``max`` or ``min``.
    """
    op_type, combine, name = _COMBINE[reduction]
    dtype = x.dtype
    assert dtype is not None
    flat = g.reshape(x, [-1])
    if not all(isinstance(d, int) and d for d in places.shape or (None,)):
        # One more element with the neutral value, because a maximum needs at least one.
        start = g.const(np.array([neutral(name, dtype)]), dtype)
        places = g.op.Concat(g.reshape(places, [-1]), g.const([-1]), axis=0)
        source = g.op.Concat(g.reshape(source, [-1]), start, axis=0)
    places, source = (g.op.Unsqueeze(g.reshape(v, [-1]), g.const([0])) for v in (places, source))
    count = g.op.Squeeze(g.op.Shape(flat), g.const([0]))
    every = g.op.Unsqueeze(g.op.Range(g.const(0), count, g.const(1)), g.const([1]))
    hits = g.op.Where(g.op.Equal(every, places), source, g.const(neutral(name, dtype), dtype))
    total = reduced(g, op_type, hits, 1, False, dtype, exact=True)
    return g.op.Reshape(getattr(g.op, combine)(flat, total), g.shape(x))


def _numbered(g: GraphBuilder, x: Value) -> Value:
    """Each place's number in the flattened tensor, in the shape of the tensor."""
    count = g.op.Size(x)
    return g.op.Reshape(g.op.Range(g.const(0), count, g.const(1)), g.shape(x))


def scattered_in(g: GraphBuilder, dtype: ir.DataType, reduction: str = "add") -> ir.DataType:
    """The dtype in which scattered elements are reduced; bools are numbers then."""
    if dtype == BOOL:
        return INT32
    if g.opset < _SINCE[reduction]:
        return computed_in(g, "ReduceSum Add Where", wide(dtype))
    return computed_in(g, "ScatterElements", dtype)


def scatter_elements(
    g: GraphBuilder, x: Value, axis: int, index: Value, source: Value, reduction: str = "none", nan: bool = True
) -> Value:
    """ScatterElements; only the part of the source that the index covers is used, as in torch.

    NaN beats every number in a maximum or minimum with ``exact=True`` and ``nan``; ONNX leaves its place open.
    """
    if not rank_of(x):
        one = [unsqueeze(g, v, 0) if not rank_of(v) else v for v in (x, index, source)]
        return squeeze(g, scatter_elements(g, one[0], 0, one[1], one[2], reduction, nan), 0)
    if not rank_of(index):
        index, source = unsqueeze(g, index, 0), unsqueeze(g, source, 0) if not rank_of(source) else source
    if tuple(index.shape or ()) != tuple(source.shape or ()):
        rank = rank_of(source)
        source = g.op.Slice(
            source,
            g.const([0] * rank, INT64),
            g.shape(index),
            g.const(list(range(rank)), INT64),
        )
    named = {} if reduction == "none" else {"reduction": reduction}
    dtype = x.dtype
    assert dtype is not None
    inner = scattered_in(g, dtype, reduction) if named else dtype
    if g.opset < _SINCE[reduction]:
        places = g.op.GatherElements(_numbered(g, x), index, axis=normalize_axis(axis, rank_of(x)))
        return g.cast(_by_hits(g, g.cast(x, inner), places, g.cast(source, inner), reduction), dtype)
    x, source, axis = g.cast(x, inner), g.cast(source, inner), normalize_axis(axis, rank_of(x))
    result = g.op.ScatterElements(x, index, source, axis=axis, **named)
    if g.exact and nan and reduction in ("max", "min") and inner.is_floating_point():
        own, given = (g.cast(g.op.IsNaN(v), FLOAT) for v in (x, source))
        flags = g.op.ScatterElements(own, index, given, axis=axis, reduction="max")
        result = g.op.Where(g.cast(flags, BOOL), g.const(float("nan"), inner), result)
    return g.cast(result, dtype)


def scatter_slices(g: GraphBuilder, x: Value, places: Value, source: Value) -> Value:
    """``x`` with slices of the source added at places that the last axis of ``places`` names: ScatterND that adds."""
    if g.opset < _SINCE["add"]:
        return _by_hits(g, x, g.op.GatherND(_numbered(g, x), places), source, "add")
    return g.op.ScatterND(x, places, source, reduction="add")


def neutral(reduction: str, dtype: ir.DataType) -> Any:
    """The neutral element of a reduction."""
    if reduction in ("sum", "mean", "add"):
        return 0
    if reduction in ("prod", "multiply"):
        return 1
    if dtype.is_floating_point():
        return float("-inf") if reduction == "amax" else float("inf")
    limits = np.iinfo(dtype.numpy())
    return int(limits.min if reduction == "amax" else limits.max)


def scatter_rows(
    g: GraphBuilder,
    rows: Value,
    places: Value,
    count: Value | int,
    reduction: str,
    dtype: ir.DataType,
    nan: bool = True,
) -> Value:
    """``count`` rows, each the reduction of the rows scattered to it; a row without any has the neutral value.

    Args:
        g: The builder.
        rows: [n, ...]; converted to ``dtype``.
        places: [n], int64, each at least 0 and less than ``count``.
        count: How many rows there are in the result.
        reduction: ``"sum"``, ``"prod"``, ``"amax"`` or ``"amin"``.
        dtype: Element type of the result.
        nan: Whether NaN beats every number with ``exact=True``, in maxima and minima.
    """
    rank = rank_of(rows)
    shape = [count, *g.dims(rows)[1:]]
    start = g.op.Expand(g.const(neutral(reduction, dtype), dtype), g.vector(shape))
    if rank > 1:
        places = g.op.Expand(g.op.Reshape(places, g.const([-1] + [1] * (rank - 1))), g.shape(rows))
    return scatter_elements(g, start, 0, places, g.cast(rows, dtype), REDUCTIONS[reduction], nan)


def run_of_each(g: GraphBuilder, starts: Value, count: Value | int) -> Value:
    """For each of ``count`` items the number of the run that it lies in: how many runs start at or before it, less one.

    Args:
        g: The builder.
        starts: [runs], int64, ascending from 0, none greater than ``count``; equal starts give empty runs.
        count: The number of items.
    """
    ones = g.op.Expand(g.const(1), g.op.Shape(starts))
    after = g.op.Add(g.as_scalar(count), g.const(1))
    begun = scatter_rows(g, ones, starts, after, "sum", INT64)
    running = g.op.Slice(g.op.CumSum(begun, g.const(0)), np.array([0]), np.array([-1]), np.array([0]))
    return g.op.Sub(running, g.const(1))
