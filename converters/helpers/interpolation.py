"""Interpolation one axis at a time: the coordinates of the result's elements in the input, and their weights.

They are computed here for static sizes, and in the graph for dynamic sizes. The formulas are those of
ATen/native/UpSample.h: ``area_pixel_compute_scale``, ``area_pixel_compute_source_index``, and for nearest neighbours
``nearest_neighbor_compute_source_index``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.antialiasing import antialiased_weights, computed_antialiased_weights
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.filters import computed_filter, filter_of
from onnxplug.converters.helpers.matrices import product_along
from onnxplug.interpret.node import FxNode

#: The coefficient of PyTorch's cubic convolution, without antialiasing.
_CUBIC = -0.75
#: PyTorch multiplies the weights for bytes by the largest of these that leaves none of them larger.
_POWERS = 2.0 ** np.arange(23)
_MOST_OF_A_WEIGHT = 2**15 - 0.5


class Axis(NamedTuple):
    """One axis of an interpolation.

    Attributes:
        size, out: Number of elements before and after: ints, or 0-dim int64 Values.
        factor: The factor by which coordinates are mapped; ``None``: ``out / size``.
        ratio: ``out / size`` where it is known to be a whole number, else ``None``.
        follows: ``out`` is known to be ``size * factor`` rounded down.
    """

    size: Any
    out: Any
    factor: float | None
    ratio: int | None
    follows: bool

    @property
    def is_static(self) -> bool:
        """Whether both sizes are ints."""
        return isinstance(self.size, int) and isinstance(self.out, int)


def axes_of(g: GraphBuilder, node: FxNode) -> list[Axis]:
    """The spatial axes of either form of an upsampling operator (``.vec``, or with a factor for each axis)."""
    x = node.args[0]
    named = node.kwargs
    size = named["output_size"]
    count = rank_of(x) - 2
    if "scale_factors" in named:
        factors = list(named["scale_factors"] or [None] * count)
    else:
        factors = [v for k, v in named.items() if k.startswith("scales")]
    result = []
    for number in range(count):
        dim, want = (x.shape or ())[2 + number], node.shape[2 + number]
        out: Any = want
        if not isinstance(want, int):
            fixed = size[number] if size is not None else None
            out = fixed if isinstance(fixed, Value) else g.size(want)
        # torch ignores a factor that is not positive.
        factor = factors[number]
        factor = float(factor) if factor is not None and factor > 0 else None
        ratio = _ratio(g, dim, want)
        follows = factor is not None and (size is None or factor == ratio)
        if isinstance(dim, int) and isinstance(out, int):
            follows = factor is not None and int(dim * factor) == out
        result.append(Axis(g.dim(x, 2 + number), out, factor, ratio, follows))
    return result


def _ratio(g: GraphBuilder, size: Any, out: Any) -> int | None:
    if isinstance(size, int) and isinstance(out, int):
        return out // size if size and out % size == 0 else None
    if isinstance(size, int) or isinstance(out, int):
        return None
    a, b = g.sizes.expressions.get(size.value), g.sizes.expressions.get(out.value)
    quotient = b / a if a is not None and b is not None else None
    return int(quotient) if quotient is not None and quotient.is_Integer else None


# -- nearest neighbours ------------------------------------------------------------------------------------------------


def nearest_places(g: GraphBuilder, axis: Axis, exact: bool, snaps: bool) -> Value:
    """The index of the nearest element for each element of the result, computed in float32 as in PyTorch: [out].

    Args:
        g: The builder.
        axis: The axis.
        exact: Coordinates are those of the elements' centres.
        snaps: The factor is ignored where the size stays or doubles, as in PyTorch's kernel of two axes.
    """
    if axis.is_static:
        return g.const(_nearest(axis.size, axis.out, axis.factor, exact, snaps))
    size, out = g.as_scalar(axis.size), g.as_scalar(axis.out)
    if axis.factor is not None:
        step = g.const(1.0 / axis.factor, FLOAT)
        if snaps:
            step = g.op.Where(g.op.Equal(out, g.op.Mul(size, g.const(2))), g.const(0.5, FLOAT), step)
            step = g.op.Where(g.op.Equal(out, size), g.const(1.0, FLOAT), step)
    else:
        step = g.op.Div(g.cast(size, FLOAT), g.cast(out, FLOAT))
    places = g.cast(g.op.Range(g.const(0), out, g.const(1)), FLOAT)
    if exact:
        places = g.op.Add(places, g.const(0.5, FLOAT))
    index = g.cast(g.op.Floor(g.op.Mul(places, step)), INT64)
    return g.op.Min(index, g.op.Sub(size, g.const(1)))


def _nearest(size: int, out: int, factor: float | None, exact: bool, snaps: bool) -> np.ndarray:
    index = np.arange(out)
    if snaps and out == size:
        return index
    if snaps and out == 2 * size:
        return index // 2
    step = np.float32(1.0 / factor) if factor else np.float32(size) / np.float32(out)
    places = index.astype(np.float32) + np.float32(0.5 if exact else 0.0)
    return np.minimum(np.floor(places * step).astype(np.int64), size - 1)


def is_plain_nearest(axis: Axis) -> bool:
    """Whether every formula for the nearest neighbour agrees.

    They do if the factor is a small whole number, or a half, a quarter or an eighth.
    """
    if axis.ratio is not None and 1 <= axis.ratio <= 16 and axis.factor in (None, float(axis.ratio)):
        return True
    return axis.factor in (0.5, 0.25, 0.125) and axis.follows


# -- linear and cubic --------------------------------------------------------------------------------------------------


def by_weights(
    g: GraphBuilder, x: Value, axes: list[Axis], dtype: ir.DataType, *, corners: bool, mode: str, widen: bool
) -> Value:
    """Separable interpolation as a product with a matrix of weights for each axis.

    Args:
        g: The builder.
        x: [batch, channels, *sizes].
        axes: Its spatial axes.
        dtype: The result's.
        corners: The first and last elements stay where they are.
        mode: ``"linear"``, ``"cubic"`` or ``"lanczos"``.
        widen: The filter grows with the step between points, as Pillow's (antialiasing).
    """
    if dtype.is_integer():
        return g.cast(_bytes_by_weights(g, x, axes, corners, mode, widen), dtype)
    inner = x.dtype if x.dtype in (FLOAT, DOUBLE) else FLOAT
    precision = inner if widen else DOUBLE
    result = g.cast(x, inner)
    for number, axis in enumerate(axes):
        if axis.is_static:
            form = (axis.size, axis.out, axis.factor, corners, mode)
            array = antialiased_weights(*form, precision) if widen else _weights(*form)
            weights = g.const(array.T, inner)
        else:
            weights = g.op.Transpose(_computed_weights(g, axis, corners, mode, widen, precision, inner), perm=[1, 0])
        result = product_along(g, result, 2 + number, weights)
    return g.cast(result, dtype)


def _bytes_by_weights(g: GraphBuilder, x: Value, axes: list[Axis], corners: bool, mode: str, widen: bool) -> Value:
    """The same of bytes, in PyTorch's integers: weights of 15 bits, and bytes after each axis, the last of which comes first.

    An axis whose size stays is copied, whatever the factor.
    Every number here is whole, or a whole number divided by a power of two, and small enough to be exact.
    """
    result = x
    for number, axis in reversed(list(enumerate(axes))):
        if axis.is_static and axis.size == axis.out:
            continue
        if axis.is_static:
            form = (axis.size, axis.out, axis.factor, corners, mode)
            exact = antialiased_weights(*form, DOUBLE) if widen else _weights(*form)
            bits = int(np.sum(exact.max(initial=0.0) * _POWERS[1:] < _MOST_OF_A_WEIGHT))
            array = np.trunc(exact * _POWERS[bits] + np.copysign(0.5, exact))
            inner = FLOAT if 256 * np.abs(array).sum(1).max(initial=0.0) < 2**24 else DOUBLE
            weights, unit = g.const(array.T, inner), g.const(_POWERS[bits], inner)
        else:
            inner = DOUBLE
            computed = _computed_weights(g, axis, corners, mode, widen, DOUBLE, DOUBLE)
            if mode == "cubic" and not widen and axis.factor is not None:
                computed = _unless_same(g, axis, computed)
            largest = g.op.ReduceMax(computed, keepdims=0)
            smaller = g.op.Less(g.op.Mul(largest, g.const(_POWERS[1:], DOUBLE)), g.const(_MOST_OF_A_WEIGHT, DOUBLE))
            unit = g.op.Gather(g.const(_POWERS, DOUBLE), g.op.ReduceSum(g.cast(smaller, INT64), keepdims=0))
            scaled = g.op.Mul(computed, unit)
            size = g.op.Floor(g.op.Add(g.op.Abs(scaled), g.const(0.5, DOUBLE)))
            weights = g.op.Transpose(g.op.Mul(size, g.op.Sign(scaled)), perm=[1, 0])
        total = product_along(g, g.cast(result, inner), 2 + number, weights)
        rounded = g.op.Floor(g.op.Add(g.op.Div(total, unit), g.const(0.5, inner)))
        result = g.op.Clip(rounded, g.const(0.0, inner), g.const(255.0, inner))
    return result


def _weights(size: int, out: int, factor: float | None, corners: bool, mode: str) -> np.ndarray:
    """The weight of each element of an axis in each element of the result: [out, size].

    Linear interpolation copies a size that stays, whatever the factor; cubic interpolation of floats follows it there too.
    """
    if size == out and mode == "linear":
        return np.eye(size)
    if corners:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1.0 / factor if factor else size / out
    weights = np.zeros((out, size))
    for i in range(out):
        source = step * i if corners else step * (i + 0.5) - 0.5
        if mode == "linear":
            source = max(source, 0.0)
        low = int(np.floor(source))
        for j in range(low - 1, low + 3):
            weight = float(filter_of(np.array(source - j), mode, _CUBIC))
            weights[i, min(max(j, 0), size - 1)] += weight
    return weights


def _computed_weights(
    g: GraphBuilder, axis: Axis, corners: bool, mode: str, widen: bool, precision: ir.DataType, dtype: ir.DataType
) -> Value:
    """The weights of sizes that are only known at run time: [out, size]."""
    size, out = g.as_scalar(axis.size), g.as_scalar(axis.out)
    step = _computed_step(g, size, out, axis.factor, corners, precision)
    if widen:
        weights = g.cast(computed_antialiased_weights(g, size, out, step, mode, precision), dtype)
    else:
        compute = _computed_linear if mode == "linear" else _computed_cubic
        weights = g.cast(compute(g, size, _computed_sources(g, out, step, corners)), dtype)
    copies = axis.factor is not None and (widen or mode == "linear")
    return _unless_same(g, axis, weights) if copies or (widen and corners) else weights


def _computed_sources(g: GraphBuilder, out: Value, step: Value, corners: bool) -> Value:
    """The coordinate of each element of the result in the input: [out, 1], double."""
    half = g.const(0.5, DOUBLE)
    index = unsqueeze(g, g.cast(g.op.Range(g.const(0), out, g.const(1)), DOUBLE), 1)
    return g.op.Mul(index, step) if corners else g.op.Sub(g.op.Mul(g.op.Add(index, half), step), half)


def _computed_linear(g: GraphBuilder, size: Value, sources: Value) -> Value:
    """Linear weights; coordinates outside the input are clamped to its first or last element."""
    end = g.cast(g.op.Sub(size, g.const(1)), DOUBLE)
    places = unsqueeze(g, g.cast(g.op.Range(g.const(0), size, g.const(1)), DOUBLE), 0)
    sources = g.op.Min(g.op.Max(sources, g.const(0.0, DOUBLE)), end)
    return computed_filter(g, g.op.Sub(sources, places), "linear", 0.0)


def _computed_cubic(g: GraphBuilder, size: Value, sources: Value) -> Value:
    """Cubic weights of the four nearest elements; elements outside the input are its first or last element."""
    op, zero = g.op, g.const(0.0, DOUBLE)
    end = g.cast(op.Sub(size, g.const(1)), DOUBLE)
    places = unsqueeze(g, g.cast(op.Range(g.const(0), size, g.const(1)), DOUBLE), 0)
    low = op.Floor(sources)
    terms = []
    for offset in (-1.0, 0.0, 1.0, 2.0):
        neighbour = op.Add(low, g.const(offset, DOUBLE))
        weight = computed_filter(g, op.Sub(sources, neighbour), "cubic", _CUBIC)
        clamped = op.Min(op.Max(neighbour, zero), end)
        terms.append(op.Where(op.Equal(clamped, places), weight, zero))
    return functools.reduce(op.Add, terms)


def _unless_same(g: GraphBuilder, axis: Axis, weights: Value) -> Value:
    """The identity where both sizes are the same at run time."""
    size, out = g.as_scalar(axis.size), g.as_scalar(axis.out)
    rows = unsqueeze(g, g.op.Range(g.const(0), out, g.const(1)), 1)
    columns = unsqueeze(g, g.op.Range(g.const(0), size, g.const(1)), 0)
    assert weights.dtype is not None
    same = g.cast(g.op.Equal(rows, columns), weights.dtype)
    return g.op.Where(g.op.Equal(size, out), same, weights)


def _computed_step(
    g: GraphBuilder, size: Value, out: Value, factor: float | None, corners: bool, dtype: ir.DataType
) -> Value:
    """The distance between the points of the result, in elements of the input."""
    one = g.const(1)
    if corners:
        gaps = g.cast(g.op.Max(g.op.Sub(out, one), one), dtype)
        step = g.op.Div(g.cast(g.op.Sub(size, one), dtype), gaps)
        return g.op.Where(g.op.Greater(out, one), step, g.const(0.0, dtype))
    if factor is not None:
        return g.const(1.0 / factor, dtype)
    result = g.op.Div(g.cast(size, dtype), g.cast(out, dtype))
    return result
