"""Softmax, LogSoftmax and Hardmax; before opset 13 they are over ``axis`` and all later axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from onnxplug_reference.kernels import Kernel, wider

Along = Callable[[np.ndarray, int], np.ndarray]


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """exp(x - max) / sum. float16 is computed in float16, as for ONNX's own test values."""
    narrow = wider(x)
    wide = x if narrow is None or x.dtype == np.float16 else x.astype(narrow)
    if not wide.size:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        powers = np.exp(wide - wide.max(axis, keepdims=True))
        return (powers / powers.sum(axis, keepdims=True)).astype(x.dtype)


def log_softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """x - max - log(sum(exp(x - max)))."""
    if not x.size:
        return x
    narrow = wider(x)
    wide = x if narrow is None else x.astype(narrow)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = wide - wide.max(axis, keepdims=True)
        return (shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))).astype(x.dtype)


def hardmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """1 at the first largest element, 0 elsewhere."""
    result = np.zeros_like(x)
    if x.size:
        narrow = wider(x)
        first = np.expand_dims((x if narrow is None else x.astype(narrow)).argmax(axis), axis)
        np.put_along_axis(result, first, np.ones((), x.dtype), axis)
    return result


def _flattened(function: Along, x: np.ndarray, *, axis: int = 1) -> np.ndarray:
    """A function before opset 13, over ``axis`` and all later axes together."""
    axis %= max(x.ndim, 1)
    rows = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return function(rows, 1).reshape(x.shape)


def _along(function: Along, x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return function(x, axis)


def _kernels(op: str, function: Along) -> list[Kernel]:
    before: Any = partial(_flattened, function)
    return [
        Kernel(op, before, since=1, widen=False),
        Kernel(op, partial(_along, function), since=13, widen=False),
    ]


KERNELS = [*_kernels("Softmax", softmax), *_kernels("LogSoftmax", log_softmax), *_kernels("Hardmax", hardmax)]
