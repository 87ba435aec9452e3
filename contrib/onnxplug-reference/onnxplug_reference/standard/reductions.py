"""Reductions that onnx's evaluator computes in another element type, or not of integers and single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import sizes

#: A function that reduces axes, which stay with size 1.
Reduction = Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


def _sum_square(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.sum(x * x, axes, x.dtype, keepdims=True)


def _log_sum(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.log(np.sum(x, axes, keepdims=True))


def _log_sum_exp(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = x.max(axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    return np.log(np.sum(np.exp(x - top), axes, keepdims=True)) + top


def _floats(function: Reduction) -> Reduction:
    """A function of floats; integers are computed in float64, and cast back."""

    def reduced(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        return function(x if x.dtype.kind == "f" else x.astype(np.float64), axes).astype(x.dtype)

    return reduced


def _over(reduction: Reduction, x: np.ndarray, axes: Sequence[int] | None, keepdims: int) -> np.ndarray:
    places = tuple(sorted(a % x.ndim for a in axes)) if axes and x.ndim else tuple(range(x.ndim))
    result = reduction(x, places)
    return result if keepdims else result.squeeze(places)


def _by_attribute(reduction: Reduction) -> Callable[..., np.ndarray]:
    def run(x: np.ndarray, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> np.ndarray:
        return _over(reduction, x, axes, keepdims)

    return run


def _by_input(reduction: Reduction) -> Callable[..., np.ndarray]:
    def run(
        x: np.ndarray, axes: np.ndarray | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> np.ndarray:
        places = [] if axes is None else sizes(axes)
        if places or not noop_with_empty_axes:
            return _over(reduction, x, places, keepdims)
        return reduction(x, ())  # the function of each element

    return run


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceLogSum": _floats(_log_sum),
    "ReduceLogSumExp": _floats(_log_sum_exp),
    "ReduceSumSquare": _sum_square,
}

KERNELS = [
    *(Kernel(op, _by_attribute(function)) for op, function in _REDUCTIONS.items()),
    *(Kernel(op, _by_input(function), since=18) for op, function in _REDUCTIONS.items()),
]
