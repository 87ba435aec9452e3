"""Weights in levels of few bits, ``(level - zero) * scale``: a scale for each block of a row, and a zero point where asked for.

Of the scales and zero points tried for a block, the pair with the least squared error is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

#: The scales tried for a block, as shares of the scale that its farthest weights need.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


class Levels(NamedTuple):
    """A matrix in levels.

    Attributes:
        levels: [N, blocks, size * bits / 8] bytes; of 4 bits two neighbours in each. The last block of a row is filled up.
        scales: [N, blocks] of the matrix's dtype, or in float16 where that changes none.
        zeros: [N, (blocks + 1) / 2] bytes, two zero points of 4 bits in each; ``None``: all zero points are in the
            middle.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


def rounded(weight: torch.Tensor, size: int, bits: int, *, zero_points: bool = False) -> Levels:
    """A matrix in levels, with the best scales and zero points of those tried; each level is the nearest for its scale.

    Args:
        weight: [N, K].
        bits: 4 or 8.
        zero_points: Whether blocks of 4 bits have a zero point of their own.
    """
    blocks = nn.functional.pad(weight.float(), (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    zero_points = zero_points and bits == 4
    numbers, scales, zeros = (
        _with_zeros(blocks, weight.dtype) if zero_points else _around_the_middle(blocks, weight.dtype, bits)
    )
    levels = (numbers + zeros).to(torch.uint8)
    return Levels(
        together(levels) if bits == 4 else levels,
        stored(scales.squeeze(-1).to(weight.dtype)),
        zero_bytes(zeros.squeeze(-1).to(torch.uint8)) if zero_points else None,
    )


def _around_the_middle(
    blocks: torch.Tensor, dtype: torch.dtype, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps from zero, scales and zero points."""
    half = 1 << (bits - 1)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    kind = _dtype_of(largest.abs() / half, dtype)
    scales, errors = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for share in _SHARES if bits == 4 else _SHARES[:1]:
        for lowest in (-half, half):  # which end of the levels the largest number takes
            scale = _fitted(blocks, _scale(largest * share / lowest, kind), -half, half - 1, kind)
            error = (blocks - _steps(blocks, scale, -half, half - 1) * scale).square().sum(-1, keepdim=True)
            scales, errors = torch.where(error < errors, scale, scales), torch.minimum(error, errors)
    return _steps(blocks, scales, -half, half - 1), scales, torch.full_like(scales, half)


def _with_zeros(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with zero points, for 4 bits; zero is a level in every block."""
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
    kind = _dtype_of((high - low) / 15, dtype)
    scales, errors, zeros = torch.ones_like(low), torch.full_like(low, torch.inf), torch.full_like(low, 8.0)
    for share in _SHARES:
        first = _scale((high - low) / 15 * share, kind)
        middle = 7.5 - (high + low) / 2 / first
        for zero in (middle.floor().clamp(0, 15), middle.ceil().clamp(0, 15)):
            scale = first
            for _ in range(2):
                scale = _fitted(blocks, scale, -zero, 15 - zero, kind)
                error = (blocks - _steps(blocks, scale, -zero, 15 - zero) * scale).square().sum(-1, keepdim=True)
                better = error < errors
                scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
                errors = torch.minimum(error, errors)
    return _steps(blocks, scales, -zeros, 15 - zeros), scales, zeros


def _dtype_of(scales: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of stored scales: float16, unless the smallest or the largest are beyond its ordinary numbers."""
    nonzero = scales[scales != 0]
    normal = (nonzero * min(_SHARES) > torch.finfo(torch.float16).tiny) & (nonzero < 1e4)
    return torch.float16 if bool(normal.all()) else dtype


def _fitted(
    blocks: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | int, high: torch.Tensor | int, dtype: torch.dtype
) -> torch.Tensor:
    """The scale with which the levels of another scale are nearest to the weights."""
    steps = _steps(blocks, scale, low, high)
    return _scale((blocks * steps).sum(-1, keepdim=True) / steps.square().sum(-1, keepdim=True), dtype)


def _scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale as it is stored; 1 for blocks of zeros."""
    rounded = scale.to(dtype).float()
    return torch.where(rounded.isfinite() & (rounded != 0), rounded, 1.0)


def _steps(
    blocks: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | int, high: torch.Tensor | int
) -> torch.Tensor:
    return (blocks / scale).round().clamp(torch.as_tensor(low), torch.as_tensor(high))


def stored(scales: torch.Tensor) -> torch.Tensor:
    """The scales in float16, where that changes none of them."""
    half = scales.half()
    return half if torch.equal(half.to(scales.dtype), scales) else scales


def zero_bytes(zeros: torch.Tensor) -> torch.Tensor | None:
    """Two zero points of 4 bits in each byte; ``None`` where all are in the middle.

    Args:
        zeros: [N, blocks] bytes.
    """
    return None if bool((zeros == 8).all()) else together(nn.functional.pad(zeros, (0, zeros.shape[1] % 2)))


def restored(levels: torch.Tensor, scales: torch.Tensor, bits: int, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """The weights, [N, blocks * size], of the scales' dtype."""
    numbers = (apart(levels) if bits == 4 else levels).to(scales.dtype)
    middle: torch.Tensor | int = 1 << (bits - 1)
    if zeros is not None:
        middle = (zeros if bits == 8 else apart(zeros)[:, : levels.shape[1]])[..., None].to(scales.dtype)
    return ((numbers - middle) * scales[..., None]).flatten(1)


def together(numbers: torch.Tensor) -> torch.Tensor:
    """Two neighbours of the last axis in a byte."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def apart(packed: torch.Tensor) -> torch.Tensor:
    """The two numbers of each byte beside each other, the low half first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def in_steps(x: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks of rows in 127 steps of their largest number."""
    blocks = nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / steps.where(steps != 0, 1.0)).round() * steps).flatten(-2)[..., : x.shape[-1]]
