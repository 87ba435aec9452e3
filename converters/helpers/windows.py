"""Windows along axes: of pooling, adaptive pooling and unfold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, INT64
from onnxplug.converters.helpers.reductions import reduce


def windows_of(g: GraphBuilder, x: Value, axis: int, size: int, step: int) -> Value:
    """Windows of one axis, ``step`` apart: the axis becomes two, the windows and the elements of each."""
    count = g.op.Add(g.op.Div(g.op.Sub(g.as_scalar(g.dim(x, axis)), g.const(size)), g.const(step)), g.const(1))
    starts = g.op.Mul(g.op.Range(g.const(0), count, g.const(1)), g.const(step))
    offsets = g.const(list(range(size)), INT64)
    index = g.op.Add(unsqueeze(g, starts, 1), offsets)
    return g.op.Gather(x, index, axis=axis)


def spread(values: Any, count: int) -> list[int]:
    """One number for each spatial axis."""
    numbers = [values] if isinstance(values, int) else list(values)
    return numbers * count if len(numbers) == 1 else numbers


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


def adaptive_mask(g: GraphBuilder, size: Any, out: Any) -> Value:
    """Which places of an axis lie in each of torch's adaptive windows, floor(i n / o) to ceil((i + 1) n / o): [out, n].

    No window: a result of shape [0, n]; an empty tensor is divided by 1, since ONNX Runtime rejects a divisor of 0.
    """
    size, windows = g.as_scalar(size), g.as_scalar(out)
    one = g.const(1)
    index = unsqueeze(g, g.op.Range(g.const(0), windows, one), 1)
    count = windows if isinstance(out, int) and out else g.op.Max(windows, one)
    first = g.op.Div(g.op.Mul(index, size), count)
    last = g.op.Div(g.op.Add(g.op.Mul(g.op.Add(index, one), size), g.op.Sub(count, one)), count)
    place = unsqueeze(g, g.op.Range(g.const(0), size, one), 0)
    return g.op.And(g.op.GreaterOrEqual(place, first), g.op.Less(place, last))


def planes(g: GraphBuilder, x: Value) -> Value:
    """[batch, channels, *sizes] as [batch, channels, elements]."""
    sizes = [g.dim(x, axis) for axis in range(2, rank_of(x))]
    known = [size for size in sizes if isinstance(size, int)]
    # A size that is inferred is an error of ONNX Runtime where the batch is empty.
    return g.op.Reshape(x, g.const([0, 0, math.prod(known) if len(known) == len(sizes) else -1]))


def max_of_windows(
    g: GraphBuilder, x: Value, sizes: Sequence[int], windows: Sequence[np.ndarray], exact: bool = False
) -> tuple[Value, Value]:
    """The largest element of each window and its place in the plane.

    Args:
        g: The builder.
        x: [batch, channels, *sizes].
        sizes: Static sizes.
        windows: For each axis the places of each window, [out, width].
        exact: Whether NaN is the largest value.
    """
    spatial = len(sizes)
    out = [w.shape[0] for w in windows]
    places = np.zeros([1] * (2 * spatial), dtype=np.int64)
    for axis, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        shape = [1] * (2 * spatial)
        shape[axis], shape[spatial + axis] = window.shape
        places = places * size + window.reshape(shape)
    flat_places = places.reshape(math.prod(out), -1)
    gathered = g.op.Gather(planes(g, x), g.const(flat_places), axis=2)
    values, chosen = largest_along(g, gathered, 3, exact)
    index = g.op.GatherElements(g.op.Expand(g.const(flat_places[None, None]), g.shape(gathered)), chosen, axis=3)
    batch = [g.dim(x, 0), g.dim(x, 1)]
    return g.reshape(squeeze(g, values, 3), [*batch, *out]), g.reshape(squeeze(g, index, 3), [*batch, *out])


def largest_along(g: GraphBuilder, x: Value, axis: int, exact: bool = False) -> tuple[Value, Value]:
    """The largest along an axis, which stays with size 1, and its place; with ``exact`` the first NaN where there is one."""
    place = g.op.ArgMax(x, axis=axis, keepdims=1)
    if exact:
        nan = g.cast(g.op.IsNaN(x), FLOAT)
        some = g.cast(reduce(g, "ReduceMax", nan, [axis], True), BOOL)
        place = g.op.Where(some, g.op.ArgMax(nan, axis=axis, keepdims=1), place)
    return g.op.GatherElements(x, place, axis=axis), place


def adaptive_max_dynamic(g: GraphBuilder, x: Value, out: Sequence[int], exact: bool = False) -> list[Value]:
    """Adaptive max pool of sizes that are only known at run time: an axis at a time, the last axis first.

    Equal elements keep the index of the first element in the plane.
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
        masked = g.op.Where(adaptive_mask(g, size, out[axis - 2]), moved, g.const(float("-inf"), x.dtype))
        values, chosen = largest_along(g, masked, rank, exact)
        picked = g.op.GatherElements(g.op.Expand(moved_index, g.op.Shape(masked)), chosen, axis=rank)
        x, index = (g.op.Transpose(squeeze(g, v, rank), perm=back) for v in (values, picked))
    return [x, index]


def ceil_extra_dynamic(
    g: GraphBuilder, x: Value, spans: Sequence[int], stride: Sequence[int], pads: Sequence[int]
) -> list[Value]:
    """The padding that ceil_mode adds at the end of each axis, computed at run time.

    The number of windows is rounded up; a last window that would start in the padding is dropped.
    """
    extra = []
    for axis, (k, s, p) in enumerate(zip(spans, stride, pads, strict=True)):
        size = g.as_scalar(g.dim(x, 2 + axis))
        windows = g.op.Div(g.op.Add(size, g.const(2 * p - k + s - 1)), g.const(s))
        starts_late = g.op.GreaterOrEqual(g.op.Mul(windows, g.const(s)), g.op.Add(size, g.const(p)))
        windows = g.op.Sub(windows, g.cast(starts_late, INT64))
        more = g.op.Sub(g.op.Add(g.op.Mul(windows, g.const(s)), g.const(k - 2 * p)), size)
        extra.append(g.op.Max(more, g.const(0)))
    return extra


def has_ceil_mode(g: GraphBuilder, spans: Sequence[int], stride: Sequence[int], pads: Sequence[int]) -> bool:
    """Whether ONNX's own ``ceil_mode`` has torch's windows at all sizes.

    Before opset 22 it keeps a last window that starts in the padding behind, which torch drops; steps this short never reach it.
    """
    return g.opset >= 10 and all(s <= k - p for k, s, p in zip(spans, stride, pads, strict=True))


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
        return g.op.Mul(mean, g.const(math.prod(kernel) / divisor, x.dtype))
    inner = [g.dim(x, 2 + a) for a in range(spatial)]
    ones = g.op.Expand(g.const(1.0, x.dtype), g.vector([1, 1, *inner]))
    padding = g.vector([0, 0, *pads, 0, 0, *pads])
    mask = g.op.Pad(ones, padding, g.const(1.0 if include else 0.0, x.dtype))
    mask = g.op.Pad(mask, g.vector([0, 0, *[0] * spatial, 0, 0, *extra]), zero)
    result = g.op.Div(mean, g.op.AveragePool(mask, **named))
    return result
