"""Further operators for which onnx's evaluator has no kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import gelu, sizes, sliced, typed


def scatter(data: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, axis: int = 0) -> np.ndarray:
    """Scatter, the former name of ScatterElements, without a reduction."""
    result = data.copy()
    places = np.where(indices < 0, indices + data.shape[axis], indices)
    np.put_along_axis(result, places, updates, axis)
    return result


def gather_elements(data: np.ndarray, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
    """The elements at indices along an axis; the other axes of the indices may be shorter than the data's."""
    inside = tuple(slice(None) if i == axis % data.ndim else slice(n) for i, n in enumerate(indices.shape))
    return np.take_along_axis(data[inside], indices.astype(np.int64), axis)


def softsign(x: np.ndarray) -> np.ndarray:
    """x / (1 + |x|)."""
    return x / (1 + np.abs(x))


def flatten(x: np.ndarray, *, axis: int = 1) -> np.ndarray:
    """A matrix: the axes before ``axis`` as one, and the others."""
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def slice_(
    x: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    """Every step-th element from start to end of axes."""
    begin, stop = sizes(starts), sizes(ends)
    places = sizes(axes) if axes is not None else list(range(len(begin)))
    strides = sizes(steps) if steps is not None else [1] * len(begin)
    for a, b, axis, step in zip(begin, stop, places, strides, strict=True):
        x = np.take(x, sliced(a, b, step, x.shape[axis]), axis)
    return x


def unique(x: np.ndarray, *, axis: int | None = None, sorted: int = 1, outputs: int) -> tuple[np.ndarray, ...]:
    """The different elements, or the different slices of an axis, sorted or in the order in which they first appear.

    Also the place at which each first appears, for each element the place of its equal, and how often each is there.
    """
    x = x.reshape(-1) if axis is None else x
    y, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
        y = np.take(x, first, axis or 0)
    return y, *(values.astype(np.int64) for values in (first, inverse, counts))


def one_hot(indices: np.ndarray, depth: np.ndarray, values: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """values[1] at each index along a new axis, values[0] elsewhere and for an index outside."""
    count = int(depth.reshape(()))
    axis %= indices.ndim + 1
    places = np.arange(count).reshape(-1, *[1] * (indices.ndim - axis))
    wrapped = np.expand_dims(np.where(indices < 0, indices + count, indices), axis)
    return np.where(wrapped == places, values[1], values[0])


def global_lp_pool(x: np.ndarray, *, p: int = 2) -> np.ndarray:
    """(sum of |x|^p)^(1/p) over the spatial axes, which stay with size 1."""
    axes = tuple(range(2, x.ndim))
    return typed((np.abs(x.astype(np.float64)) ** p).sum(axes, keepdims=True) ** (1 / p), x)


def max_roi_pool(
    x: np.ndarray, rois: np.ndarray, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
) -> np.ndarray:
    """The largest element of each cell of a grid over each region: [batch index, x1, y1, x2, y2], ends included.

    A cell outside of the image is 0.
    """
    rows, columns = pooled_shape
    result = np.zeros((len(rois), x.shape[1], rows, columns), x.dtype)
    for number, roi in enumerate(rois):
        x1, y1, x2, y2 = (int(np.floor(v * spatial_scale + 0.5)) for v in roi[1:])
        heights = _cells(y1, max(y2 - y1 + 1, 1), rows, x.shape[2])
        widths = _cells(x1, max(x2 - x1 + 1, 1), columns, x.shape[3])
        for i, (top, bottom) in enumerate(heights):
            for j, (left, right) in enumerate(widths):
                if bottom > top and right > left:
                    result[number, :, i, j] = x[int(roi[0]), :, top:bottom, left:right].max((1, 2))
    return result


def _cells(start: int, length: int, count: int, size: int) -> list[tuple[int, int]]:
    """The begin and end of each cell that divides a length, within an axis."""
    step = length / count
    return [
        (
            min(max(int(np.floor(i * step)) + start, 0), size),
            min(max(int(np.ceil((i + 1) * step)) + start, 0), size),
        )
        for i in range(count)
    ]


def optional(value: Any = None, *, type: Any = None) -> Any:
    """An optional with a value, or an empty optional of a type."""
    return (value,)


# Equal seeds give equal numbers, which differ from any runtime's.


def _generator(seed: float | None) -> np.random.Generator:
    return np.random.default_rng(None if seed is None else int(np.float32(seed).view(np.uint32)))


def _dtype(number: int) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(number)


def random_normal_like(
    x: np.ndarray, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> np.ndarray:
    """Normally distributed numbers of a tensor's shape, and of its dtype when none is given."""
    kind = x.dtype if dtype is None else _dtype(dtype)
    return np.asarray(_generator(seed).normal(mean, scale, x.shape)).astype(kind)


def random_uniform_like(
    x: np.ndarray, *, dtype: int | None = None, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> np.ndarray:
    """Uniformly distributed numbers of a tensor's shape, and of its dtype when none is given."""
    kind = x.dtype if dtype is None else _dtype(dtype)
    return np.asarray(_generator(seed).uniform(low, high, x.shape)).astype(kind)


def multinomial(
    x: np.ndarray, *, dtype: int = onnx.TensorProto.INT32, sample_size: int = 1, seed: float | None = None
) -> np.ndarray:
    """Random classes [batch, sample_size] by unnormalised logarithms of probabilities, [batch, classes]."""
    noise = _generator(seed).gumbel(size=(x.shape[0], sample_size, x.shape[1]))
    return (x.astype(np.float64)[:, None, :] + noise).argmax(-1).astype(_dtype(dtype))


KERNELS = [
    Kernel("Flatten", flatten, widen=False),
    Kernel("Gelu", gelu, since=20),
    Kernel("Slice", slice_, since=10, widen=False),
    Kernel("Softsign", softsign),
    Kernel("Unique", unique, since=11),
    Kernel("Optional", optional, since=15, widen=False),
    Kernel("RandomNormalLike", random_normal_like, widen=False),
    Kernel("RandomUniformLike", random_uniform_like, widen=False),
    Kernel("Multinomial", multinomial, since=7, widen=False),
    Kernel("Scatter", scatter, since=9, widen=False),
    Kernel("GatherElements", gather_elements, since=11, widen=False),
    Kernel("OneHot", one_hot, since=9, widen=False),
    Kernel("GlobalLpPool", global_lp_pool, since=2),
    Kernel("MaxRoiPool", max_roi_pool),
]
