"""The gradients of grid_sample, as decompositions in terms of PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from onnxplug.registry.rule import Rule

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
_CUBIC = -0.75


class _Tap(NamedTuple):
    """One of the places along an axis that a point is interpolated from, for every point.

    Attributes:
        place: The place, or 0 where it lies outside; int64.
        inside: Whether it lies in the image.
        weight: Its weight.
        slope: The derivative of the weight by the grid's coordinate.
    """

    place: torch.Tensor
    inside: torch.Tensor
    weight: torch.Tensor
    slope: torch.Tensor


def grid_sampler_backward(
    spatial: int,
    grad: torch.Tensor,
    x: torch.Tensor,
    grid: torch.Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """grid_sampler_2d_backward and its sibling for three axes.

    A result is the sum over taps of value times the weights of all axes; so the image's gradient is scattered by these weights,
    and the grid's is the sum over taps of value times the slope of one axis and the weights of the others.

    Args:
        spatial: The number of axes.
        grad: [N, C, *points].
        x: [N, C, *sizes].
        grid: [N, *points, spatial], the last axis of the image first.
        mode, padding, align_corners: As of the forward operator.
        wanted: Whether the image's gradient is.
    """
    sizes, lead = x.shape[2:], x.shape[:2]
    taps = [_taps(grid[..., spatial - 1 - axis], sizes[axis], mode, padding, align_corners) for axis in range(spatial)]
    values, slope_of_result = x.reshape([*lead, -1]), grad.reshape([*lead, -1])
    image = torch.zeros_like(values)
    slopes = [torch.zeros_like(grid[..., 0]) for _ in range(spatial)]
    for chosen in itertools.product(*taps):
        inside, index = chosen[0].inside, chosen[0].place
        for axis in range(1, spatial):
            inside = inside & chosen[axis].inside
            index = index * sizes[axis] + chosen[axis].place
        places = torch.where(inside, index, 0).reshape([lead[0], 1, -1]).expand_as(slope_of_result)
        if wanted[0]:
            weight = torch.where(inside, math.prod(tap.weight for tap in chosen), 0.0)
            image = image.scatter_add(2, places, slope_of_result * weight.reshape([lead[0], 1, -1]))
        if mode != _NEAREST:
            along = torch.where(inside, (values.gather(2, places) * slope_of_result).sum(1).reshape(inside.shape), 0.0)
            for axis in range(spatial):
                rest = math.prod((tap.weight for i, tap in enumerate(chosen) if i != axis), start=chosen[axis].slope)
                slopes[axis] = slopes[axis] + along * rest
    return image.reshape(x.shape) if wanted[0] else None, torch.stack(slopes[::-1], -1)


def _taps(coordinates: torch.Tensor, size: Any, mode: int, padding: int, align_corners: bool) -> list[_Tap]:
    if align_corners:
        at, scale = (coordinates + 1) / 2 * (size - 1), torch.ones_like(coordinates) * (size - 1) / 2
    else:
        at, scale = ((coordinates + 1) * size - 1) / 2, torch.ones_like(coordinates) * size / 2
    if mode == _BICUBIC:
        first = at.floor()
        t = at - first
        bounded = [_bounded(first + k, size, padding, align_corners)[0] for k in (-1, 0, 1, 2)]
        weights = [_outer(t + 1), _inner(t), _inner(1 - t), _outer(2 - t)]
        derivatives = [_outer_slope(t + 1), _inner_slope(t), -_inner_slope(1 - t), -_outer_slope(2 - t)]
        rows = zip(bounded, weights, derivatives, strict=True)
        return [_tap(place, size, weight, slope * scale) for place, weight, slope in rows]
    at, turn = _bounded(at, size, padding, align_corners)
    if mode == _NEAREST:
        return [_tap(at.round(), size, torch.ones_like(at), torch.zeros_like(at))]
    first, slope = at.floor(), scale * turn
    return [_tap(first, size, 1 - (at - first), -slope), _tap(first + 1, size, at - first, slope)]


def _tap(at: torch.Tensor, size: Any, weight: torch.Tensor, slope: torch.Tensor) -> _Tap:
    inside = (at >= 0) & (at < size)
    return _Tap(torch.where(inside, at, 0.0).to(torch.int64), inside, weight, slope)


def _bounded(at: torch.Tensor, size: Any, padding: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates brought into the image by the padding mode, and the derivative of that: 1, -1 or 0."""
    turn = torch.ones_like(at)
    if padding == _ZEROS:
        return at, turn
    if padding == _REFLECTION:
        if align_corners and isinstance(size, int) and size == 1:
            return torch.zeros_like(at), torch.zeros_like(at)
        low = 0.0 if align_corners else -0.5
        span = size - 1 if align_corners else size
        turn = torch.where(at < low, -1.0, turn)
        away = (at - low).abs()
        flips, extra = (away / span).floor(), torch.fmod(away, span)
        is_even = torch.fmod(flips, 2) == 0
        at, turn = torch.where(is_even, extra, span - extra) + low, torch.where(is_even, turn, -turn)
    return at.clamp(0, size - 1), torch.where((at > 0) & (at < size - 1), turn, 0.0)


def _inner(x: torch.Tensor) -> torch.Tensor:
    """The cubic kernel at distances up to 1."""
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _inner_slope(x: torch.Tensor) -> torch.Tensor:
    return (3 * (_CUBIC + 2) * x - 2 * (_CUBIC + 3)) * x


def _outer(x: torch.Tensor) -> torch.Tensor:
    """The cubic kernel at distances from 1 to 2."""
    return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


def _outer_slope(x: torch.Tensor) -> torch.Tensor:
    return (3 * _CUBIC * x - 10 * _CUBIC) * x + 8 * _CUBIC


#: Qualified name to the decomposition of a backward operator.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    f"aten::grid_sampler_{n}d_backward.default": partial(grid_sampler_backward, n) for n in (2, 3)
}

RULES: list[Rule] = []
