"""Reductions, running sums, sorting and softmax by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onnxplug_reference.kernels import Kernel

#: A function that reduces axes, which stay with size 1.
Reduction = Callable[[Tensor, list[int]], Tensor]


def _prod(x: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        x = torch.prod(x, axis, keepdim=True, dtype=x.dtype)
    return x


def _extreme(largest: bool) -> Reduction:
    def reduced(x: Tensor, axes: list[int]) -> Tensor:
        if not all(x.shape[a] for a in axes):  # without elements: the dtype's limit
            shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
            return torch.full(shape, _limit(x.dtype, smallest=largest), dtype=x.dtype, device=x.device)
        if x.dtype == torch.bool:
            return (torch.amax if largest else torch.amin)(x.to(torch.uint8), axes, keepdim=True).bool()
        return (torch.amax if largest else torch.amin)(x, axes, keepdim=True)

    return reduced


def _limit(dtype: torch.dtype, *, smallest: bool) -> Any:
    if dtype == torch.bool:
        return not smallest
    if dtype.is_floating_point:
        return -torch.inf if smallest else torch.inf
    return torch.iinfo(dtype).min if smallest else torch.iinfo(dtype).max


def _sum(x: Tensor, axes: list[int]) -> Tensor:
    return torch.sum(x, axes, keepdim=True, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int]) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=True)
    return torch.mean(x.double(), axes, keepdim=True).to(x.dtype)


def _floats(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of floats; integers are computed in float64, and cast back."""
    return function(x) if x.is_floating_point() else function(x.double()).to(x.dtype)


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceL1": lambda x, axes: _sum(x.abs(), axes),
    "ReduceL2": lambda x, axes: _floats(lambda y: _sum(y * y, axes).sqrt(), x),
    "ReduceLogSum": lambda x, axes: _floats(lambda y: _sum(y, axes).log(), x),
    "ReduceLogSumExp": lambda x, axes: _floats(lambda y: torch.logsumexp(y, axes, keepdim=True), x),
    "ReduceMax": _extreme(True),
    "ReduceMean": _mean,
    "ReduceMin": _extreme(False),
    "ReduceProd": _prod,
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, axes: _sum(x * x, axes),
}


def _over(reduction: Reduction, x: Tensor, axes: Sequence[int] | None, keepdims: int) -> Tensor:
    places = sorted(a % x.dim() for a in axes) if axes else list(range(x.dim()))
    if not x.dim():
        return reduction(x.reshape(1), [0]).reshape(())
    result = reduction(x, places)
    return result if keepdims else result.squeeze(places)


def _by_attribute(reduction: Reduction) -> Callable[..., Tensor]:
    def run(x: Tensor, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
        return _over(reduction, x, axes, keepdims)

    return run


def _by_input(reduction: Reduction) -> Callable[..., Tensor]:
    def run(x: Tensor, axes: Tensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        places = axes.reshape(-1).tolist() if axes is not None else []
        if places or not noop_with_empty_axes:
            return _over(reduction, x, places, keepdims)
        # A reduction without axes still applies its function to each element.
        return reduction(x.unsqueeze(-1), [x.dim()]).squeeze(-1)

    return run


def _arg(largest: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        best = x.amax(axis, keepdim=True) if largest else x.amin(axis, keepdim=True)
        equal = (x == best) | (x != x)
        if select_last_index:
            places = x.shape[axis] - 1 - equal.flip(axis).to(torch.uint8).argmax(axis, keepdim=True)
        else:
            places = equal.to(torch.uint8).argmax(axis, keepdim=True)
        return places if keepdims else places.squeeze(axis)

    return run


def cumsum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running sums along an axis, without the element itself (``exclusive``), from the end (``reverse``)."""
    return _running(torch.cumsum, 0, x, int(axis), exclusive, reverse)


def _running(
    function: Callable[..., Tensor], neutral: int, x: Tensor, axis: int, exclusive: int, reverse: int
) -> Tensor:
    axis %= x.dim()
    x = x.flip(axis) if reverse else x
    if exclusive and x.shape[axis]:
        first = torch.full_like(x.narrow(axis, 0, 1), neutral)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    result = function(x, axis, dtype=x.dtype)
    return result.flip(axis) if reverse else result


def top_k(x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements in order; equal elements by their indices."""
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = int(k)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax along an axis; float16 is computed step by step, as for ONNX's own test values."""
    if x.dtype != torch.float16 or not x.numel():
        return F.softmax(x, axis)
    powers = torch.exp(x - x.amax(axis, keepdim=True))
    return powers / powers.sum(axis, keepdim=True)


def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """The logarithm of softmax along an axis."""
    return F.log_softmax(x, axis)


def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """1 at the first largest element along an axis."""
    if not x.numel():
        return x
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


KERNELS = [
    *(Kernel(op, _by_attribute(function)) for op, function in _REDUCTIONS.items()),
    *(Kernel(op, _by_input(f), since=13 if op == "ReduceSum" else 18) for op, f in _REDUCTIONS.items()),
    Kernel("ArgMax", _arg(True)),
    Kernel("ArgMin", _arg(False)),
    Kernel("CumSum", cumsum, since=11),
    Kernel("TopK", top_k, since=11),
    Kernel("Softmax", softmax, since=13),
    Kernel("LogSoftmax", log_softmax, since=13),
    Kernel("Hardmax", hardmax, since=13),
]
