"""Convolutions and samples of planes where onnx's kernel lacks a case or a version."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx.reference.ops.op_grid_sample import GridSample
from onnx.reference.ops.op_resize import Resize
from onnx.reference.ops.op_roi_align import RoiAlign

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import typed

#: [N, g, C/g, ...] by [g, C/g, M/g] to [N, g, M/g, ...]
_SPREAD = "ngc...,gcm->ngm..."
_einsum: Any = np.einsum
#: Any, as onnx declares that its kernels take lists.
_grid_sample: Any = GridSample.eval
_resize: Any = Resize.eval
_roi_align: Any = RoiAlign.eval


class Transposed(NamedTuple):
    """A transposed convolution's strides, dilations, and the part of its whole result: start and size on each axis."""

    steps: list[int]
    spread: list[int]
    starts: list[int]
    sizes: list[int]


def transposed(
    x: Any,
    w: Any,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Transposed:
    """The geometry of a transposed convolution by its attributes, for arrays or tensors."""
    rank = len(x.shape) - 2
    step, spread, extra = (list(v or [d] * rank) for v, d in ((strides, 1), (dilations, 1), (output_padding, 0)))
    starts, sizes = [], []
    for i in range(rank):
        full = step[i] * (x.shape[i + 2] - 1) + extra[i] + (w.shape[i + 2] - 1) * spread[i] + 1
        if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            wanted = output_shape[-rank:][i] if output_shape else x.shape[i + 2] * step[i]
            total = full - wanted
            before = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        else:
            before, after = (pads[i], pads[i + rank]) if pads else (0, 0)
            wanted = full - before - after
        starts.append(before)
        sizes.append(wanted)
    return Transposed(step, spread, starts, sizes)


def conv_transpose(
    x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, *, group: int = 1, **attributes: Any
) -> np.ndarray:
    """A transposed convolution of x, [N, C, ...], by w, [C, M / group, ...]: each element spread over its window.

    The whole result is cut at both ends: by ``pads``, or to ``output_shape``, or for SAME_UPPER and SAME_LOWER to
    strides times the input's size.
    """
    step, spread, starts, sizes = transposed(x, w, **attributes)
    kernel, rank = w.shape[2:], x.ndim - 2
    groups = x.astype(np.float64).reshape(x.shape[0], group, -1, *x.shape[2:])
    weights = w.astype(np.float64).reshape(group, -1, *w.shape[1:])
    room = []
    for i, (k, n) in enumerate(zip(kernel, x.shape[2:], strict=True)):
        room.append(max(starts[i] + sizes[i], (k - 1) * spread[i] + 1 + step[i] * (n - 1)))
    whole = np.zeros((x.shape[0], group, w.shape[1], *room))
    taps = weights.reshape(*weights.shape[:3], -1)
    for number, place in enumerate(itertools.product(*map(range, kernel))):
        part = _einsum(_SPREAD, groups, taps[..., number])
        where = tuple(
            slice(k * d, k * d + p * (m - 1) + 1, p)
            for k, d, p, m in zip(place, spread, step, x.shape[2:], strict=True)
        )
        whole[(slice(None),) * 3 + where] += part
    cut = whole.reshape(x.shape[0], -1, *room)
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True), 2):
        if start < 0:
            cut = np.concatenate([np.zeros((*cut.shape[:axis], -start, *cut.shape[axis + 1 :])), cut], axis)
        cut = np.take(cut, range(max(start, 0), max(start, 0) + size), axis)
    return typed(cut if b is None else cut + b.reshape(-1, *[1] * rank), x)


_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def grid_sample_16(
    x: np.ndarray, grid: np.ndarray, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> np.ndarray:
    """GridSample before opset 20, with other names of modes."""
    return grid_sample(x, grid, align_corners=align_corners, mode=_MODES.get(mode, mode), padding_mode=padding_mode)


def grid_sample(
    x: np.ndarray, grid: np.ndarray, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> np.ndarray:
    """Samples of x at the places of a grid."""
    if mode == "cubic" and padding_mode == "border":
        return _cubic_within_border(x, grid, bool(align_corners))
    return _grid_sample(x, grid, mode=mode, align_corners=align_corners, padding_mode=padding_mode)


def _cubic_within_border(x: np.ndarray, grid: np.ndarray, align_corners: bool) -> np.ndarray:
    """Cubic samples in which pixels outside are the nearest pixels inside; onnx's kernel moves the samples' places inside."""
    taps = []
    for axis, size in enumerate(x.shape[2:]):
        place = grid[..., -1 - axis].astype(np.float64)
        place = (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2
        low = np.floor(place)
        near = [_cubic(np.abs(place - low - shift)) for shift in (-1, 0, 1, 2)]
        rows = [np.nan_to_num(low + shift).clip(0, size - 1).astype(np.int64) for shift in (-1, 0, 1, 2)]
        taps.append(list(zip(near, rows, strict=True)))
    number = np.arange(x.shape[0]).reshape(-1, *[1] * (grid.ndim - 2))
    total = np.zeros((*grid.shape[:-1], x.shape[1]))
    for tap in itertools.product(*taps):
        total += math.prod(weight for weight, _ in tap)[..., None] * x[(number, slice(None), *(row for _, row in tap))]  # type: ignore[index]
    return typed(np.moveaxis(total, -1, 1), x)


def _cubic(distance: np.ndarray) -> np.ndarray:
    """The weight of a pixel in a cubic sample, by its distance up to 2."""
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
    return np.where(distance <= 1, near, far)


def roi_align_10(x: np.ndarray, rois: np.ndarray, batch_indices: np.ndarray, **attributes: Any) -> np.ndarray:
    """RoiAlign before opset 16, whose coordinates are not shifted by half a pixel."""
    return _roi_align(x, rois, batch_indices, coordinate_transformation_mode="output_half_pixel", **attributes)


def resize_10(x: np.ndarray, scales: np.ndarray, *, mode: str = "nearest") -> np.ndarray:
    """Resize before opset 11, and Upsample: a place times 1 / scale, rounded down for the nearest."""
    return _resize(
        x,
        np.empty(0, np.float32),
        scales,
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def upsample_7(x: np.ndarray, *, mode: str = "nearest", scales: Sequence[float]) -> np.ndarray:
    """Upsample with scales as an attribute."""
    return resize_10(x, np.array(scales, np.float32), mode=mode)


KERNELS = [
    Kernel("ConvTranspose", conv_transpose),
    Kernel("GridSample", grid_sample_16, since=16),
    Kernel("GridSample", grid_sample, since=20),
    Kernel("Resize", resize_10, since=10, until=10),
    Kernel("RoiAlign", roi_align_10, since=10, until=15),
    Kernel("Upsample", upsample_7, since=7),
    Kernel("Upsample", resize_10, since=9),
]
