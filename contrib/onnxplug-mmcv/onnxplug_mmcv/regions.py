"""Pooling of regions by ATen operators: samples of each bin are gathered, four neighbours each."""

from __future__ import annotations

import torch
from torch import Tensor


def roi_align(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """``roi_align_forward`` of mmcv's extension, which writes ``output``; the places of the maxima serve gradients alone.

    Args:
        input: [N, C, H, W]
        rois: [K, 5], rows of (batch, x1, y1, x2, y2).
        output: [K, C, aligned_height, aligned_width]
        argmax_y, argmax_x: As ``output``, or empty.
        aligned_height, aligned_width: The bins of a region.
        spatial_scale: From the regions' unit to pixels of ``input``.
        sampling_ratio: Samples of a bin along each axis; as many as it has pixels where it is 0.
        pool_mode: 1 for averages, 0 for maxima.
        aligned: Whether coordinates are of pixels' corners.
    """
    if pool_mode == 1:
        import torchvision  # noqa: F401

        sizes = (aligned_height, aligned_width, sampling_ratio, aligned)
        output.copy_(torch.ops.torchvision.roi_align(input, rois, spatial_scale, *sizes))
        return
    shift = 0.5 if aligned else 0.0
    x1, y1, x2, y2 = (rois[:, 1:].float() * spatial_scale - shift).unbind(1)
    sides = [side if aligned else side.clamp(min=1.0) for side in (y2 - y1, x2 - x1)]
    y, rows = _samples(y1, sides[0], aligned_height, sampling_ratio)
    x, columns = _samples(x1, sides[1], aligned_width, sampling_ratio)
    values = _at(input, rois[:, 0], y[:, :, None, :, None], x[:, None, :, None, :])
    # The kernel's maximum begins with this number.
    largest = values.masked_fill(~(rows[:, :, None] & columns[:, None])[:, None, None, :, :, None], -10000.0)
    output.copy_(largest.amax((3, 4)).clamp(min=-10000.0).permute(0, 3, 1, 2))


def roi_align_rotated(
    input: Tensor,
    rois: Tensor,
    height: int,
    width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
) -> Tensor:
    """Averages of bins of rotated regions, [K, C, height, width].

    Args:
        input: [N, C, H, W]
        rois: [K, 6], rows of (batch, x, y, width, height, angle): the middle, and radians.
        height, width: The bins of a region.
        spatial_scale: From the regions' unit to pixels of ``input``.
        sampling_ratio: Samples of a bin along each axis; as many as it has pixels where it is 0.
        aligned: Whether coordinates are of pixels' corners.
        clockwise: Whether angles turn with the clock.
    """
    middle_x, middle_y, across, down, angle = rois[:, 1:].float().unbind(1)
    shift = 0.5 if aligned else 0.0
    sides = [side * spatial_scale for side in (down, across)]
    sides = sides if aligned else [side.clamp(min=1.0) for side in sides]
    y, rows = _samples(-sides[0] / 2, sides[0], height, sampling_ratio)
    x, columns = _samples(-sides[1] / 2, sides[1], width, sampling_ratio)
    y, x = y[:, :, None, :, None], x[:, None, :, None, :]
    angle = -angle if clockwise else angle
    turned = (angle.sin(), angle.cos(), middle_y * spatial_scale - shift, middle_x * spatial_scale - shift)
    sine, cosine, middle_y, middle_x = (v[:, None, None, None, None] for v in turned)
    values = _at(input, rois[:, 0], y * cosine - x * sine + middle_y, y * sine + x * cosine + middle_x)
    seen = rows[:, :, None] & columns[:, None]
    total = torch.where(seen[:, None, None, :, :, None], values, 0.0).sum((3, 4))
    count = seen.sum((1, 2)).clamp(min=1)[:, None, None, None]
    return (total / count).permute(0, 3, 1, 2).to(input.dtype)


def _samples(start: Tensor, side: Tensor, bins: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Samples along one axis: places, [K, bins, most samples of any bin], and the mask of a region's, [K, most]."""
    if ratio > 0:
        count = torch.full_like(side, ratio)
        places = torch.arange(ratio, device=side.device)
    else:
        count = (side / bins).ceil()
        places = torch.arange(torch.cat([count, count.new_ones(1)]).max().long().item(), device=side.device)
    step = side / bins
    first = start[:, None] + torch.arange(bins, device=side.device) * step[:, None]
    # A side of 0 has no samples; its places, which the mask leaves out, are numbers too.
    offsets = (places + 0.5) * step[:, None] / count.clamp(min=1.0)[:, None]
    return first[:, :, None] + offsets[:, None], places < count[:, None]


def _at(input: Tensor, batch: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Interpolated values, [K, ..., C], at places [K, ...] of images ``batch`` [K]; 0 more than a pixel outside."""
    height, width = input.shape[2:]
    pixels = input.float().permute(0, 2, 3, 1).flatten(0, 2)
    y, x = torch.broadcast_tensors(y, x)
    first = batch.long().reshape(-1, *(1 for _ in range(y.dim() - 1))) * (height * width)
    outside = (y < -1.0) | (y > height) | (x < -1.0) | (x > width)
    y, x = (v.clamp(0, size - 1) for v, size in ((y, height), (x, width)))
    low = [v.long() for v in (y, x)]
    high = [(v + 1).clamp(max=size - 1) for v, size in zip(low, (height, width), strict=True)]
    share = [v - v.floor() for v in (y, x)]
    total = torch.zeros((), device=input.device)
    for rows, tall in ((low[0], 1 - share[0]), (high[0], share[0])):
        for columns, broad in ((low[1], 1 - share[1]), (high[1], share[1])):
            total = total + (tall * broad).unsqueeze(-1) * pixels[first + rows * width + columns]
    return total.masked_fill(outside.unsqueeze(-1), 0.0)
