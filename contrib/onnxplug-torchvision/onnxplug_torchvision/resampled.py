"""Masks and heatmaps of detected objects, each resampled to the size of its box, all boxes at once.

torchvision resamples box by box, in a loop over their number. Here the weights of every box are two matrices, of rows and of
columns, and resampling is a product with both.
"""

from __future__ import annotations

from typing import Any

import torch


def paste_masks_in_image(masks: Any, boxes: Any, img_shape: tuple[int, int], padding: int = 1) -> torch.Tensor:
    """Masks [N, 1, S, S] of boxes [N, 4], resampled bilinearly (``align_corners=False``) into images [N, 1, H, W]."""
    size = masks.shape[-1]
    padded = torch.nn.functional.pad(masks, (padding,) * 4)[:, 0]
    scale = (size + 2 * padding) / size
    center = (boxes[:, :2] + boxes[:, 2:]) * 0.5
    half = (boxes[:, 2:] - boxes[:, :2]) * 0.5 * scale
    first, last = (center - half).to(torch.int64), (center + half).to(torch.int64)
    columns, rows = (
        _bilinear(first[:, axis], last[:, axis], img_shape[1 - axis], size + 2 * padding, masks.dtype)
        for axis in (0, 1)
    )
    return (rows @ padded @ columns.mT)[:, None]


def _bilinear(first: torch.Tensor, last: torch.Tensor, length: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights of ``size`` samples in pixels, [N, length, size]; 0 for pixels outside of ``first`` to ``last``."""
    pixel = torch.arange(length)
    ratio = size / (last - first + 1).clamp(min=1).to(dtype)
    source = ((pixel - first[:, None]).to(dtype) + 0.5) * ratio[:, None] - 0.5
    distance = (source.clamp(0, size - 1)[..., None] - torch.arange(size)).abs()
    inside = (pixel >= first[:, None]) & (pixel <= last[:, None])
    return (1 - distance).clamp(min=0) * inside[..., None]


def heatmaps_to_keypoints(maps: Any, rois: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of the maximum of each heatmap [N, K, S, S], resampled bicubically to the size of its box [N, 4].

    Returns:
        x, y and 1, [N, K, 3], and the maxima, [N, K].
    """
    sizes = (rois[:, 2:] - rois[:, :2]).clamp(min=1)
    ceiled = sizes.ceil()
    columns, rows = (_bicubic(ceiled[:, axis], maps.shape[3 - axis], maps.dtype) for axis in (0, 1))
    keypoints, high, wide = maps.shape[1:]
    height, width = rows.shape[1], columns.shape[1]
    # Products of three dimensions: torch.export would take a broadcast product of four to be of two boxes or more.
    resampled = rows @ maps.transpose(1, 2).reshape(-1, high, keypoints * wide)
    resampled = resampled.reshape(-1, height * keypoints, wide) @ columns.mT
    resampled = resampled.reshape(-1, height, keypoints, width).transpose(1, 2)
    outside = (torch.arange(height)[:, None] >= ceiled[:, 1, None, None]) | (
        torch.arange(width) >= ceiled[:, 0, None, None]
    )
    flat = resampled.masked_fill(outside[:, None], float("-inf")).flatten(2)
    scores, place = flat.max(-1)
    x, y = place % width, place // width
    points = (torch.stack([x, y], -1).to(maps.dtype) + 0.5) * (sizes / ceiled)[:, None] + rois[:, None, :2]
    return torch.cat([points, torch.ones_like(points[..., :1])], -1), scores


def _bicubic(lengths: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights of ``size`` samples in ``lengths`` pixels, [N, longest, size] (Keys' kernel of -0.75, edges repeated)."""
    longest = torch.cat([lengths.new_ones(1), lengths]).max().to(torch.int64).item()
    torch._check(longest >= 1)
    source = (torch.arange(longest).to(dtype) + 0.5) * (size / lengths[:, None]) - 0.5
    base = source.floor()
    weights: Any = 0.0
    for tap in range(-1, 3):
        distance = (source - base - tap).abs()
        near = (1.25 * distance - 2.25) * distance**2 + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weight = torch.where(distance <= 1, near, far)
        index = (base + tap).clamp(0, size - 1)
        weights = weights + weight[..., None] * (index[..., None] == torch.arange(size))
    return weights
