"""Forms that a target computes, in place of nodes that it fails on or computes otherwise. Each was measured there."""

from __future__ import annotations

import math
from typing import Any

_FLOAT, _INT64 = 1, 7  # of onnx_ir.DataType, without importing it
#: Axes of a tensor that QNN and CoreML take.
_MOST_AXES = 5


def _attribute(node: Any, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def scatter_rows(g: Any, node: Any) -> Any:
    """ScatterND of whole rows with a reduction (``index_add``) as ScatterElements, whose reductions OpenVINO has."""
    data, indices, updates = node.inputs
    reduction = _attribute(node, "reduction", "none")
    if reduction == "none" or any(value is None or value.shape is None for value in node.inputs):
        return None
    if len(indices.shape) != 2 or indices.shape[1] != 1:
        return None
    rank = len(data.shape)
    rows = g.op.Squeeze(indices, [1]) if rank == 1 else indices
    if rank > 2:
        rows = g.op.Unsqueeze(rows, list(range(2, rank)))
    if rank > 1:
        rows = g.op.Expand(rows, g.op.Shape(updates))
    return g.op.ScatterElements(data, rows, updates, axis=0, reduction=reduction)


def clipped_below(g: Any, node: Any) -> Any:
    """Clip of int64 without an upper bound, which OpenVINO takes for a Clip in int32, as Max."""
    x, least, *most = node.inputs
    if x is None or x.dtype is None or int(x.dtype) != _INT64 or least is None or (most and most[0] is not None):
        return None
    return g.op.Max(x, least)


def counted_from_the_end(g: Any, node: Any) -> Any:
    """The Concat of two parts whose largest or smallest elements a node computes, with its axis counted from the end.

    With an axis counted from the start, OpenVINO computes Max or Min of the two parts.
    """
    from onnxplug_targets.maxima import mistaken

    concat = mistaken(node)
    shape = concat.outputs[0].shape if concat is not None else None
    if concat is None or shape is None:
        return None
    return {concat.outputs[0]: g.op.Concat(*concat.inputs, axis=concat.attributes["axis"].value - len(shape))}


def grid_sample(g: Any, node: Any) -> Any:
    """GridSample of images with mode linear, the name since opset 20, which OpenVINO does not know, as four gathers.

    A point between four pixels is their mean by distance, by the formulas of ``torch.nn.functional.grid_sample``.
    """
    x, grid = node.inputs
    if _attribute(node, "mode", "linear") != "linear" or x.shape is None or len(x.shape) != 4:
        return None
    if any(value.dtype is None or int(value.dtype) != _FLOAT for value in node.inputs):
        return None
    batch, channels, height, width = g.dims(x)
    rows, columns = g.dims(grid)[1:3]
    padding, corners = _attribute(node, "padding_mode", "zeros"), bool(_attribute(node, "align_corners", 0))
    flat = g.op.Reshape(grid, [0, -1, 2])
    weights, places = [], []
    for axis, size in ((1, height), (0, width)):
        length = g.cast(g.as_vector(size), x.dtype)
        place = _unnormalized(g, g.op.Slice(flat, [axis], [axis + 1], [2]), length, padding, corners)
        low = g.op.Floor(place)
        share = g.op.Sub(place, low)
        ends = (low, g.op.Add(low, _like(g, x, 1.0)))
        shares = (g.op.Sub(_like(g, x, 1.0), share), share)
        weights.append([_within(g, end, length, part, x) for end, part in zip(ends, shares, strict=True)])
        places.append([_index(g, end, length, x) for end in ends])
    pixels = g.reshape(x, [batch, channels, -1])
    total = None
    for i in range(2):
        for j in range(2):
            index = g.op.Add(g.op.Mul(places[0][i], g.as_vector(width)), places[1][j])
            index = g.op.Expand(g.op.Transpose(index, perm=[0, 2, 1]), g.vector([1, channels, 1]))
            weight = g.op.Transpose(g.op.Mul(weights[0][i], weights[1][j]), perm=[0, 2, 1])
            part = g.op.Mul(g.op.GatherElements(pixels, index, axis=2), weight)
            total = part if total is None else g.op.Add(total, part)
    return g.reshape(total, [batch, channels, rows, columns])


def moved_in_fewer_axes(g: Any, node: Any) -> Any:
    """Reshape, Transpose and Reshape of more than five axes, as of windows: axes that stay adjacent are merged."""
    transpose = node.inputs[0].producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    x, parted = transpose.inputs[0], transpose.inputs[0].producer()
    if parted is None or parted.op_type != "Reshape" or x.shape is None or len(x.shape) <= _MOST_AXES:
        return None
    runs: list[list[int]] = []
    for axis in _attribute(transpose, "perm", list(reversed(range(len(x.shape))))):
        if runs and axis == runs[-1][-1] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    places = sorted(range(len(runs)), key=lambda i: runs[i])
    parts = [_size([x.shape[axis] for axis in runs[i]]) for i in places]
    result = [_size([size]) for size in node.outputs[0].shape or [None, None]]
    if len(runs) > _MOST_AXES or parts.count(-1) > 1 or result.count(-1) > 1:
        return None
    moved = g.op.Transpose(g.reshape(parted.inputs[0], parts), perm=[places.index(i) for i in range(len(runs))])
    return g.reshape(moved, result)


def _size(sizes: list[Any]) -> int:
    """The product of sizes, -1 where one is unknown."""
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else -1


def _like(g: Any, x: Any, number: float) -> Any:
    return g.const([number], x.dtype)


def _unnormalized(g: Any, place: Any, length: Any, padding: str, corners: bool) -> Any:
    """Coordinates from -1 to 1 as coordinates in pixels; coordinates outside are moved by ``padding_mode``."""
    one, half = _like(g, place, 1.0), _like(g, place, 0.5)
    if corners:
        place = g.op.Mul(g.op.Mul(g.op.Add(place, one), half), g.op.Sub(length, one))
    else:
        place = g.op.Mul(g.op.Sub(g.op.Mul(g.op.Add(place, one), length), one), half)
    last = g.op.Sub(length, one)
    if padding == "reflection":
        place = _reflected(g, place, length, corners)
    if padding in ("border", "reflection"):
        zero = _like(g, place, 0.0)
        place = g.op.Min(g.op.Where(g.op.Greater(place, zero), place, zero), last)
    return place


def _reflected(g: Any, place: Any, length: Any, corners: bool) -> Any:
    """Coordinates mirrored at the centres of the outer pixels, or at their outer edges."""
    zero, one, two = (_like(g, place, number) for number in (0.0, 1.0, 2.0))
    low = zero if corners else _like(g, place, -0.5)
    span = g.op.Sub(length, one) if corners else length
    away = g.op.Abs(g.op.Sub(place, low))
    flips = g.op.Floor(g.op.Div(away, span))
    rest = g.op.Sub(away, g.op.Mul(flips, span))
    is_even = g.op.Equal(g.op.Sub(flips, g.op.Mul(g.op.Floor(g.op.Div(flips, two)), two)), zero)
    mirrored = g.op.Add(g.op.Where(is_even, rest, g.op.Sub(span, rest)), low)
    return g.op.Where(g.op.Equal(span, zero), zero, mirrored) if corners else mirrored


def _within(g: Any, place: Any, length: Any, weight: Any, x: Any) -> Any:
    """A pixel's weight, 0 outside the image; NaN for a coordinate that is not finite, as in PyTorch."""
    zero = _like(g, x, 0.0)
    inside = g.op.And(g.op.GreaterOrEqual(place, zero), g.op.Less(place, length))
    return g.op.Mul(weight, g.op.Cast(inside, to=_FLOAT))


def _index(g: Any, place: Any, length: Any, x: Any) -> Any:
    """A pixel's index, limited to the image; 0 for NaN."""
    zero = _like(g, x, 0.0)
    last = g.op.Sub(length, _like(g, x, 1.0))
    return g.op.Cast(g.op.Min(g.op.Where(g.op.Greater(place, zero), place, zero), last), to=_INT64)
