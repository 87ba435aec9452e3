"""Segments, and rows taken from them: the functions that the operators on jagged tensors share.

A jagged tensor is ``values``, the rows of all segments one after the other, and ``offsets``, where each segment begins,
with the end of the last segment. Several levels of offsets are segments of segments. All functions hold for any number
of rows and of segments, 0 included: a missing row is the row after the last, which is added where rows are taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def starts_of(offsets: Tensor) -> Tensor:
    """Where each segment begins."""
    return offsets.narrow(0, 0, offsets.shape[0] - 1)


def lengths_of(offsets: Tensor) -> Tensor:
    """The number of rows of each segment."""
    return offsets.narrow(0, 1, offsets.shape[0] - 1) - starts_of(offsets)


def offsets_of(lengths: Tensor) -> Tensor:
    """Where segments of these lengths begin, and the end of the last segment."""
    return torch.cat([lengths.new_zeros((1,)), lengths.cumsum(0, dtype=lengths.dtype)])


def size_of(value: Tensor) -> Any:
    """A number of rows that is known at run time only: a new symbol where torch computes an operator's shapes."""
    shapes = torch.library.get_ctx()
    if shapes is not None:
        return shapes.new_dynamic_size()
    size: Any = value.item()
    torch._check(size >= 0)
    return size


def last_of(offsets: Tensor) -> Any:
    """The end of the last segment, as a size."""
    return size_of(offsets[-1])


def one_more(values: Tensor, value: float = 0) -> Tensor:
    """The rows, and a further row of ``value``."""
    return torch.cat([values, values.new_full((1, *values.shape[1:]), value)])


def owners(offsets: Tensor, count: Any) -> Tensor:
    """The segment of each of ``count`` rows; the number of segments for rows outside of the segments."""
    offsets = offsets.long()
    ends = offsets.narrow(0, 1, offsets.shape[0] - 1).clamp(max=count)
    ended = ends.new_zeros((count + 1,)).scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)
    before = torch.arange(count, device=offsets.device) < offsets.narrow(0, 0, 1)
    return torch.where(before, offsets.shape[0] - 1, ended.narrow(0, 0, count))


def copied(segments: Tensor, starts: Tensor, offsets: Tensor, count: Any) -> Tensor:
    """The source row of each of ``count`` rows, whose segments are copies of other segments.

    Args:
        segments: The source segment of each new segment.
        starts: Where the source segments begin.
        offsets: Where the new segments begin, and the end of the last.
        count: The number of new rows.
    """
    shift = starts.long().index_select(0, segments.long()) - starts_of(offsets).long()
    place = torch.arange(count, device=offsets.device)
    return place + one_more(shift).index_select(0, owners(offsets, count))


def places(offsets: list[Tensor], sizes: list[Any], count: Any, segments: Any = None) -> Tensor:
    """The row of each element of a padded tensor [segments, *sizes]; ``count``, the number of rows, for padding.

    ``segments`` is the size of another operand that equals their number, so that torch need not compare both sizes.
    """
    following = [*(level.shape[0] - 1 for level in offsets[1:]), count]
    row = torch.arange(offsets[0].shape[0] - 1 if segments is None else segments, device=offsets[0].device)
    for level, size, none in zip(offsets, sizes, following, strict=True):
        starts, lengths = one_more(starts_of(level.long()))[row], one_more(lengths_of(level.long()))[row]
        number = torch.arange(size, device=level.device)
        row = torch.where(number < lengths.unsqueeze(-1), starts.unsqueeze(-1) + number, none)
    return row


def places_in_dense(offsets: list[Tensor], sizes: list[Any], count: Any) -> Tensor:
    """The place of each of ``count`` rows in a padded tensor [segments, *sizes].

    A row outside of it has the number of all places.
    """
    counts = [*(level.shape[0] - 1 for level in offsets[1:]), count]
    row = torch.arange(count, device=offsets[0].device)
    inside = torch.ones_like(row, dtype=torch.bool)
    place, stride = torch.zeros_like(row), 1
    for level, size, number in zip(reversed(offsets), reversed(sizes), reversed(counts), strict=True):
        segments = level.shape[0] - 1
        owner = one_more(owners(level, number), segments)[row]
        position = row - one_more(starts_of(level.long()))[owner]
        inside = inside & (owner < segments) & (position < size)
        place, stride, row = place + position * stride, stride * size, owner
    return torch.where(inside, place + row * stride, (offsets[0].shape[0] - 1) * stride)
