"""Pools of windows, and padding, of any number of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import sizes, typed


class Window(NamedTuple):
    """The windows of the spatial axes.

    Attributes:
        pads: Padding before and after each axis.
        room: The elements that ``ceil_mode`` adds after each axis.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[tuple[int, int]]
    room: list[int]

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The elements before and after each axis, padding and ``ceil_mode``'s room."""
        return [(before, after + more) for (before, after), more in zip(self.pads, self.room, strict=True)]

    def of(self, x: np.ndarray, value: Any) -> np.ndarray:
        """The windows of x padded with a value, [N, C, counts..., elements]."""
        return self._windows(np.pad(x, [(0, 0), (0, 0), *self.ends], constant_values=value))

    def _windows(self, x: np.ndarray) -> np.ndarray:
        rank = len(self.kernel)
        widths = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        view = sliding_window_view(x, widths, tuple(range(2, 2 + rank)))
        steps = tuple(slice(None, None, s) for s in self.strides), tuple(slice(None, None, d) for d in self.dilations)
        view = view[(slice(None), slice(None), *steps[0], *steps[1])]
        return view.reshape(*view.shape[: 2 + rank], math.prod(self.kernel))

    def counted(self, x: Any, *, padding: bool) -> np.ndarray:
        """The number of elements of x in each window, with or without padding; ``ceil_mode``'s room never counts."""
        ends = [(0, 0), (0, 0), *self.pads]
        ones = np.pad(np.ones((1, 1, *x.shape[2:])), ends, constant_values=float(padding))
        return self._windows(np.pad(ones, [(0, 0), (0, 0), *((0, more) for more in self.room)])).sum(-1)


def window(
    x: Any,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Window:
    """The windows of a pool or convolution by its attributes, for an array or tensor [N, C, ...]."""
    rank = len(kernel_shape)
    steps, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    both = list(pads or [0] * 2 * rank) if auto_pad in ("NOTSET", "") else [0] * 2 * rank
    ends, room = [], []
    for i, (n, k, s, d) in enumerate(zip(x.shape[2:], kernel_shape, steps, spread, strict=True)):
        before, after, width = both[i], both[i + rank], d * (k - 1) + 1
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            total = max((-(-n // s) - 1) * s + width - n, 0)
            before = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            after = total - before
        count = -(-(n + before + after - width) // s) + 1
        if (count - 1) * s >= n + before:  # no window starts in the padding at the end
            count -= 1
        ends.append((before, after))
        room.append(max((count - 1) * s + width - n - before - after, 0) if ceil_mode else 0)
    return Window(list(kernel_shape), steps, spread, ends, room)


def max_pool(x: np.ndarray, *, outputs: int, storage_order: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:
    """The largest element of each window without padding, and its index in the flattened tensor."""
    window_ = window(x, **attributes)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    windows = window_.of(x, lowest)
    if outputs < 2:
        return (windows.max(-1),)
    numbers = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:], order="F" if storage_order else "C")
    offsets = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * (x.ndim - 2)) * numbers.size
    places = window_.of(offsets + numbers, -1)
    best = np.where(places < 0, False, windows == windows.max(-1, keepdims=True)).argmax(-1)[..., None]
    return windows.max(-1), np.take_along_axis(places, best, -1)[..., 0].astype(np.int64)


def average_pool(x: np.ndarray, *, count_include_pad: int = 0, **attributes: Any) -> np.ndarray:
    """The mean of each window."""
    window_ = window(x, **attributes)
    return typed(window_.of(x, 0).sum(-1) / window_.counted(x, padding=bool(count_include_pad)), x)


def pad(
    x: np.ndarray,
    pads: np.ndarray,
    value: np.ndarray | None = None,
    axes: np.ndarray | None = None,
    *,
    mode: str = "constant",
) -> np.ndarray:
    """Adds elements at both ends of axes, or removes them where an amount is negative."""
    places = [a % x.ndim for a in sizes(axes)] if axes is not None else list(range(x.ndim))
    amounts = sizes(pads)
    ends = {axis: (amounts[i], amounts[i + len(places)]) for i, axis in enumerate(places)}
    cut = [slice(None)] * x.ndim
    for axis, (before, after) in ends.items():
        cut[axis] = slice(max(-before, 0), x.shape[axis] - max(-after, 0))
    wider = [(max(a, 0), max(b, 0)) for a, b in (ends.get(axis, (0, 0)) for axis in range(x.ndim))]
    if mode == "constant":
        fill = np.zeros((), x.dtype) if value is None else np.asarray(value).reshape(()).astype(x.dtype)
        return np.pad(x[tuple(cut)], wider, constant_values=fill)
    modes: dict[str, Any] = {"edge": "edge", "reflect": "reflect", "wrap": "wrap"}
    return np.pad(x[tuple(cut)], wider, mode=modes[mode])


def pad_2(x: np.ndarray, *, mode: str = "constant", pads: Sequence[int], value: float = 0.0) -> np.ndarray:
    """Pad before opset 11, with attributes."""
    return pad(x, np.array(pads), np.array(value), mode=mode)


KERNELS = [
    Kernel("AveragePool", average_pool, since=7),
    Kernel("MaxPool", max_pool),
    Kernel("Pad", pad_2, since=2),
    Kernel("Pad", pad, since=11),
]
