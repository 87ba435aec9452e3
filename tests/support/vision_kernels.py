"""CPU kernels of torchvision's operators in plain torch, from the papers' and the documentation's definitions.

Slow and simple: the references for the translations of ``contrib/onnxplug-torchvision``, where torchvision's
extension doesn't load (see :mod:`tests.support.vision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from tests.support.vision import define_vision_schemas


@cache
def define_vision_kernels() -> None:
    """Makes torchvision's operators run on the CPU. May be called any number of times."""
    if not define_vision_schemas():
        return
    library = _library()
    for kernel in (nms, roi_align, roi_pool, ps_roi_align, ps_roi_pool, deform_conv2d):
        library.impl(kernel.__name__, kernel, "CPU")


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("torchvision", "IMPL")


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Keeps the best box left, and drops the boxes that overlap it by more than the threshold."""
    left = torch.argsort(scores, descending=True, stable=True)
    area = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    kept = []
    while left.numel():
        best, left = int(left[0]), left[1:]
        kept.append(best)
        low = torch.maximum(dets[left, :2], dets[best, :2])
        high = torch.minimum(dets[left, 2:], dets[best, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        overlap = shared / (area[best] + area[left] - shared)
        left = left[~(overlap.double() > iou_threshold)]
    return torch.tensor(kept, dtype=torch.int64)


def _round(x: torch.Tensor) -> int:
    """C's round: halves away from zero."""
    value = float(x)
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def _bilinear(image: torch.Tensor, y: float, x: float) -> torch.Tensor:
    """[C] at one point of [C, H, W]: the edge reaches one pixel out, beyond is zero."""
    high, wide = image.shape[-2:]
    if y < -1 or y > high or x < -1 or x > wide:
        return image.new_zeros(image.shape[0])
    y, x = min(max(y, 0.0), high - 1.0), min(max(x, 0.0), wide - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, high - 1), min(left + 1, wide - 1)
    b, r = y - top, x - left
    return (
        image[:, top, left] * (1 - b) * (1 - r)
        + image[:, top, right] * (1 - b) * r
        + image[:, bottom, left] * b * (1 - r)
        + image[:, bottom, right] * b * r
    )


def _aligned_bins(
    image: torch.Tensor, roi: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool, floor: int
) -> torch.Tensor:
    """[C, height, width]: means of the points sampled in each bin; ``floor``: the least divisor of a mean."""
    shift = 0.5 if aligned else 0.0
    left, top, right, bottom = (float(v * scale) - shift for v in roi[1:])
    wide, high = right - left, bottom - top
    if not aligned:
        wide, high = max(wide, 1.0), max(high, 1.0)
    rows = ratio if ratio > 0 else math.ceil(high / height)
    columns = ratio if ratio > 0 else math.ceil(wide / width)
    out = image.new_zeros(image.shape[0], height, width)
    for i in range(height):
        for j in range(width):
            for p in range(rows):
                for q in range(columns):
                    y = top + high / height * (i + (p + 0.5) / rows)
                    x = left + wide / width * (j + (q + 0.5) / columns)
                    out[:, i, j] += _bilinear(image, y, x)
    count = torch.tensor(float(rows * columns), dtype=image.dtype)
    return out / count.clamp(min=floor) if floor else out / count


def roi_align(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> torch.Tensor:
    """Mask R-CNN's pooling."""
    out = input.new_zeros(rois.shape[0], input.shape[1], height, width)
    for k, roi in enumerate(rois):
        out[k] = _aligned_bins(input[int(roi[0])], roi, scale, height, width, ratio, aligned, 1)
    return out


def _mapping(rois: torch.Tensor, channels: int, height: int, width: int) -> torch.Tensor:
    own = torch.arange(channels * height * width, dtype=torch.int32).reshape(1, channels, height, width)
    return own.repeat(rois.shape[0], 1, 1, 1)


def ps_roi_align(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Light-Head R-CNN's pooling: one input channel for each bin."""
    channels = input.shape[1] // (height * width)
    mapping = _mapping(rois, channels, height, width)
    out = input.new_zeros(mapping.shape)
    for k, roi in enumerate(rois):
        bins = _aligned_bins(input[int(roi[0])], roi, scale, height, width, ratio, True, 0)
        for c, i, j in _cells(channels, height, width):
            out[k, c, i, j] = bins[mapping[k, c, i, j], i, j]
    return out, mapping


def _cells(channels: int, height: int, width: int) -> list[tuple[int, int, int]]:
    return [(c, i, j) for c in range(channels) for i in range(height) for j in range(width)]


def _span(start: int, side: int, bins: int, index: int, limit: int, like: torch.Tensor) -> slice:
    """Bin ``index`` of a region that starts at ``start``, within an axis, in the arithmetic of the tensor's dtype."""
    step = torch.tensor(side, dtype=like.dtype) / bins
    low, high = math.floor(index * step), math.ceil((index + 1) * step)
    return slice(min(max(low + start, 0), limit), min(max(high + start, 0), limit))


def _pool(
    input: torch.Tensor,
    rois: torch.Tensor,
    scale: float,
    size: tuple[int, int],
    extra: int,
    each: Callable[[int, torch.Tensor, int, int], None],
) -> None:
    """Calls ``each`` with every region's bins, [C, h, w]. ``extra``: 1 where the last pixel belongs to the region."""
    limits = [s - (1 - extra) for s in input.shape[2:]]
    for k, roi in enumerate(rois):
        left, top, right, bottom = (_round(v * scale) for v in roi[1:])
        wide, high = max(right - left + extra, 1), max(bottom - top + extra, 1)
        for i in range(size[0]):
            for j in range(size[1]):
                rows = _span(top, high, size[0], i, limits[0], input)
                columns = _span(left, wide, size[1], j, limits[1], input)
                each(k, input[int(roi[0]), :, rows, columns], i, j)


def roi_pool(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fast R-CNN's pooling; the second result is zeros."""
    out = input.new_zeros(rois.shape[0], input.shape[1], height, width)

    def each(k: int, cell: torch.Tensor, i: int, j: int) -> None:
        if cell.numel():
            out[k, :, i, j] = cell.amax((1, 2))

    _pool(input, rois, scale, (height, width), 1, each)
    return out, torch.zeros(out.shape, dtype=torch.int32)


def ps_roi_pool(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """R-FCN's pooling."""
    channels = input.shape[1] // (height * width)
    mapping = _mapping(rois, channels, height, width)
    out = input.new_zeros(mapping.shape)

    def each(k: int, cell: torch.Tensor, i: int, j: int) -> None:
        if cell.numel():
            out[k, :, i, j] = cell.mean((1, 2))[mapping[k, :, i, j].long()]

    _pool(input, rois, scale, (height, width), 0, each)
    return out, mapping


def deform_conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> torch.Tensor:
    """Deformable ConvNets v2, by grid_sample with zeros outside."""
    n, c, high, wide = input.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    moved = offset.reshape(n, offset_groups, kh, kw, 2, oh, ow)
    y = torch.arange(oh).mul(sh).sub(ph).reshape(1, 1, 1, 1, oh, 1) + torch.arange(kh).mul(dh).reshape(kh, 1, 1, 1)
    x = torch.arange(ow).mul(sw).sub(pw).reshape(1, 1, 1, 1, 1, ow) + torch.arange(kw).mul(dw).reshape(kw, 1, 1)
    y, x = y + moved[:, :, :, :, 0], x + moved[:, :, :, :, 1]
    grid = torch.stack([(2 * x + 1) / wide - 1, (2 * y + 1) / high - 1], -1).reshape(n * offset_groups, -1, 1, 2)
    pixels = input.reshape(n * offset_groups, c // offset_groups, high, wide)
    columns = torch.nn.functional.grid_sample(pixels, grid.to(input.dtype), align_corners=False)
    columns = columns.reshape(n, offset_groups, c // offset_groups, kh * kw, oh, ow)
    if use_mask:
        columns = columns * mask.reshape(n, offset_groups, 1, kh * kw, oh, ow)
    columns = columns.reshape(n, groups, c // groups * kh * kw, oh * ow)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    return (kernels @ columns).reshape(n, weight.shape[0], oh, ow) + bias.reshape(1, -1, 1, 1)
