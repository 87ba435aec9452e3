"""Pooling whose windows differ in size or place, and its inverse: gathered by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters._axes import rank_of, reduce, squeeze, unsqueeze
from onnxplug.converters.comparison import comparable
from onnxplug.converters.convolution import spread
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_INT64 = ir.DataType.INT64


def adaptive_windows(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of torch's adaptive windows, floor(i n / o) to ceil((i + 1) n / o), and which of them count: [out, widest].

    A narrower window repeats its last place.
    """
    starts = [(i * size) // out for i in range(out)]
    ends = [-((-(i + 1) * size) // out) for i in range(out)]
    widest = max(e - s for s, e in zip(starts, ends, strict=True))
    steps = np.arange(widest)[None, :]
    first, last = np.array(starts)[:, None], np.array(ends)[:, None] - 1
    return np.minimum(first + steps, last), first + steps <= last


def max_of_windows(
    g: GraphBuilder, x: Value, sizes: Sequence[int], windows: Sequence[np.ndarray]
) -> tuple[Value, Value]:
    """The largest element of each window and its place in the plane; NaN wins.

    Args:
        g: The builder.
        x: [batch, channels, *sizes].
        sizes: Static sizes.
        windows: For each axis the places of each window, [out, width].
    """
    spatial = len(sizes)
    out = [w.shape[0] for w in windows]
    places = np.zeros([1] * (2 * spatial), dtype=np.int64)
    for axis, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        shape = [1] * (2 * spatial)
        shape[axis], shape[spatial + axis] = window.shape
        places = places * size + window.reshape(shape)
    flat_places = places.reshape(math.prod(out), -1)
    plane = g.op.Reshape(x, g.const([0, 0, -1]))
    gathered = g.op.Gather(plane, g.const(flat_places), axis=2)
    values, chosen = _largest(g, gathered, 3)
    index = g.op.GatherElements(g.op.Expand(g.const(flat_places[None, None]), g.shape(gathered)), chosen, axis=3)
    batch = [g.dim(x, 0), g.dim(x, 1)]
    return g.reshape(squeeze(g, values, 3), [*batch, *out]), g.reshape(squeeze(g, index, 3), [*batch, *out])


def adaptive_mask(g: GraphBuilder, size: Any, out: Any) -> Value:
    """Which places of an axis lie in each of torch's adaptive windows, floor(i n / o) to ceil((i + 1) n / o): [out, n]."""
    size, count = g.as_scalar(size), g.as_scalar(out)
    one = g.const(1)
    index = unsqueeze(g, g.op.Range(g.const(0), count, one), 1)
    first = g.op.Div(g.op.Mul(index, size), count)
    last = g.op.Div(g.op.Add(g.op.Mul(g.op.Add(index, one), size), g.op.Sub(count, one)), count)
    place = unsqueeze(g, g.op.Range(g.const(0), size, one), 0)
    result: Value = g.op.And(g.op.GreaterOrEqual(place, first), g.op.Less(place, last))
    return result


def adaptive_max_dynamic(g: GraphBuilder, x: Value, out: Sequence[int]) -> list[Value]:
    """Adaptive max pool of sizes that are only known at run time: an axis at a time, the last one first.

    Of equal elements that keeps the one that comes first in the plane.
    """
    assert x.dtype is not None
    rank = rank_of(x)
    plane = g.const(1)
    for axis in range(2, rank):
        plane = g.op.Mul(plane, g.as_scalar(g.dim(x, axis)))
    spatial = g.op.Slice(g.shape(x), g.const([2]), g.const([rank]))
    places = g.op.Reshape(g.op.Range(g.const(0), plane, g.const(1)), spatial)
    index = g.op.Expand(places, g.shape(x))
    for axis in range(rank - 1, 1, -1):
        order = [a for a in range(rank) if a != axis] + [axis]
        back = [order.index(a) for a in range(rank)]
        size = g.as_scalar(g.dim(x, axis))
        moved, moved_index = (unsqueeze(g, g.op.Transpose(v, perm=order), rank - 1) for v in (x, index))
        shown = g.op.Where(adaptive_mask(g, size, out[axis - 2]), moved, g.const(float("-inf"), x.dtype))
        values, chosen = _largest(g, shown, rank)
        picked = g.op.GatherElements(g.op.Expand(moved_index, g.op.Shape(shown)), chosen, axis=rank)
        x, index = (g.op.Transpose(squeeze(g, v, rank), perm=back) for v in (values, picked))
    return [x, index]


def ceil_extra_dynamic(
    g: GraphBuilder, x: Value, spans: Sequence[int], stride: Sequence[int], pads: Sequence[int]
) -> list[Value]:
    """What ceil_mode adds at the end of each axis, worked out at run time.

    The number of windows is rounded up; a last one that would start in the padding is dropped.
    """
    extra = []
    for axis, (k, s, p) in enumerate(zip(spans, stride, pads, strict=True)):
        size = g.as_scalar(g.dim(x, 2 + axis))
        windows = g.op.Div(g.op.Add(size, g.const(2 * p - k + s - 1)), g.const(s))
        starts_late = g.op.GreaterOrEqual(g.op.Mul(windows, g.const(s)), g.op.Add(size, g.const(p)))
        windows = g.op.Sub(windows, g.cast(starts_late, _INT64))
        more = g.op.Sub(g.op.Add(g.op.Mul(windows, g.const(s)), g.const(k - 2 * p)), size)
        extra.append(g.op.Max(more, g.const(0)))
    return extra


def average_dynamic(
    g: GraphBuilder,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
    include: bool,
    divisor: int | None,
) -> Value:
    """avg_pool in ceil_mode of sizes that are only known at run time.

    A mean divides by the mean of a mask, which is 1 where an element counts.
    """
    assert x.dtype is not None
    spatial = len(kernel)
    extra = ceil_extra_dynamic(g, x, kernel, stride, pads)
    zero = g.const(0.0, x.dtype)
    named = {"kernel_shape": list(kernel), "strides": list(stride)}
    ends = [g.op.Add(e, g.const(p)) for e, p in zip(extra, pads, strict=True)]
    mean = g.op.AveragePool(g.op.Pad(x, g.vector([0, 0, *pads, 0, 0, *ends]), zero), **named)
    if divisor is not None:
        result: Value = g.op.Mul(mean, g.const(math.prod(kernel) / divisor, x.dtype))
        return result
    inner = [g.dim(x, 2 + a) for a in range(spatial)]
    ones = g.op.Expand(g.const(1.0, x.dtype), g.vector([1, 1, *inner]))
    padding = g.vector([0, 0, *pads, 0, 0, *pads])
    mask = g.op.Pad(ones, padding, g.const(1.0 if include else 0.0, x.dtype))
    mask = g.op.Pad(mask, g.vector([0, 0, *[0] * spatial, 0, 0, *extra]), zero)
    result = g.op.Div(mean, g.op.AveragePool(mask, **named))
    return result


def _largest(g: GraphBuilder, x: Value, axis: int) -> tuple[Value, Value]:
    """The largest along an axis, which stays with size 1, and its place; the first NaN where there is one."""
    nan = g.cast(g.op.IsNaN(x), ir.DataType.FLOAT)
    some = g.cast(reduce(g, "ReduceMax", nan, [axis], True), ir.DataType.BOOL)
    place = g.op.Where(some, g.op.ArgMax(nan, axis=axis, keepdims=1), g.op.ArgMax(x, axis=axis, keepdims=1))
    return g.op.GatherElements(x, place, axis=axis), place


def fractional_max_pool(g: GraphBuilder, node: FxNode) -> list[Value]:
    """fractional_max_pool2d(Tensor self, int[2] kernel_size, int[2] output_size, Tensor random_samples) -> (Tensor, Tensor)

    Graham (2014): with alpha = (n - k) / (o - 1) window i starts at floor((i + u) alpha) - floor(u alpha), the last one at
    n - k; u is the random sample of the axis, one for each image and channel, the last axis's first.
    """
    x, kernel, out, samples = node.args
    spatial = 2 if "2d" in node.op_name else 3
    single = rank_of(x) == spatial + 1
    x = unsqueeze(g, x, 0) if single else x
    x = g.cast(x, comparable(node.dtype))
    if rank_of(samples) == 2:
        samples = unsqueeze(g, samples, 0)
    kernel, out = spread(kernel, spatial), spread(out, spatial)
    sizes = g.concrete_shape(list(x.shape or ())[2:], "size of a fractional pool's input")
    places: Value | None = None
    for axis, (size, k, o) in enumerate(zip(sizes, kernel, out, strict=True)):
        # torch computes the places in the dtype of the samples.
        dtype = samples.dtype
        u = g.op.Gather(samples, g.const(spatial - 1 - axis), axis=2)
        starts = _starts(g, u, size, k, o, dtype)
        window = g.op.Add(unsqueeze(g, starts, 3), g.const(np.arange(k, dtype=np.int64)))
        axes = [2 + a for a in range(2 * spatial) if a not in (axis, spatial + axis)]
        window = unsqueeze(g, window, *axes)
        places = window if places is None else g.op.Add(g.op.Mul(places, g.const(size)), window)
    assert places is not None
    batch = [g.dim(x, 0), g.dim(x, 1)]
    index = g.reshape(places, [*batch, math.prod(out) * math.prod(kernel)])
    plane = g.op.Reshape(x, g.const([0, 0, -1]))
    gathered = g.op.GatherElements(plane, index, axis=2)
    shape = [*batch, math.prod(out), math.prod(kernel)]
    values, chosen = _largest(g, g.reshape(gathered, shape), 3)
    picked = g.op.GatherElements(g.reshape(index, shape), chosen, axis=3)
    results = [g.reshape(squeeze(g, v, 3), [*batch, *out]) for v in (g.cast(values, node.dtype), picked)]
    return [squeeze(g, v, 0) if single else v for v in results]


def _starts(g: GraphBuilder, u: Value, size: int, k: int, o: int, dtype: ir.DataType | None) -> Value:
    u = unsqueeze(g, u, 2)
    if o == 1:
        return g.cast(g.op.Add(g.op.Mul(u, g.const(0.0, dtype)), g.const(float(size - k), dtype)), _INT64)
    alpha = g.op.Div(g.const(float(size - k), dtype), g.const(float(o - 1), dtype))
    steps = g.const(np.arange(o).astype(np.float64), dtype)
    places = g.op.Sub(g.cast(g.op.Mul(g.op.Add(steps, u), alpha), _INT64), g.cast(g.op.Mul(u, alpha), _INT64))
    last = g.const(np.arange(o) == o - 1)
    result: Value = g.op.Where(last, g.const(size - k), places)
    return result


def max_unpool(g: GraphBuilder, node: FxNode) -> Value:
    """max_unpool2d(Tensor self, Tensor indices, SymInt[2] output_size) -> Tensor

    Each element goes to its place in an empty plane.
    """
    x, indices, size = node.args[:3]
    spatial = 2 if "2d" in node.op_name else 3
    single = rank_of(x) == spatial + 1
    if single:
        x, indices = unsqueeze(g, x, 0), unsqueeze(g, indices, 0)
    out = g.concrete_shape(list(size), "output size")
    batch = [g.dim(x, 0), g.dim(x, 1)]
    empty = g.op.Expand(g.const(0.0, node.dtype), g.vector([*batch, math.prod(out)]))
    flat = [g.op.Reshape(v, g.const([0, 0, -1])) for v in (indices, x)]
    done = g.op.ScatterElements(empty, flat[0], flat[1], axis=2)
    result = g.reshape(done, [*batch, *out])
    return squeeze(g, result, 0) if single else result


RULES: list[Rule] = [
    Rule("aten::fractional_max_pool2d.default", fractional_max_pool),
    Rule("aten::fractional_max_pool3d.default", fractional_max_pool),
    Rule("aten::max_unpool2d.default", max_unpool),
    Rule("aten::max_unpool3d.default", max_unpool),
]
