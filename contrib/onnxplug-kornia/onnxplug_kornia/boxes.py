"""kornia's non-maximum suppression: a loop with one round for each box that is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxplug.torch_private import while_loop_op


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """``kornia.geometry.bbox.nms``, whose loop runs until no box is left: the kept indices, by falling score.

    Unlike torchvision's operator it drops boxes whose overlap is NaN, as that of two empty boxes, and computes overlaps in the
    boxes' dtype. Of equal scores the lower index is first; kornia leaves their order to torch's unstable sort.

    Args:
        boxes: [N, 4] of (x1, y1, x2, y2)
        scores: [N]
        iou_threshold: The overlap above which a box is dropped.
    """
    if boxes.ndim != 2 or boxes.shape[-1] != 4:
        raise ValueError(f"boxes expected as Nx4. Got: {boxes.shape}.")
    if scores.ndim != 1:
        raise ValueError(f"scores expected as N. Got: {scores.shape}.")
    torch._check(boxes.shape[0] == scores.shape[0], lambda: "boxes and scores have different lengths")
    order, is_kept = suppressed(boxes, scores, iou_threshold)
    return order[is_kept]


def suppressed(boxes: Tensor, scores: Tensor, iou_threshold: float) -> tuple[Tensor, Tensor]:
    """The boxes' indices by falling score [N], and which of these are kept, bool [N]."""
    order = scores.sort(descending=True, stable=True).indices
    dtype = boxes.dtype if boxes.dtype in (torch.float32, torch.float64) else torch.float32
    if not boxes.is_floating_point():
        dtype = torch.int64
    corners = boxes.to(dtype)[order]
    x1, y1, x2, y2 = corners.unbind(-1)
    areas = (x2 - x1) * (y2 - y1)
    places = torch.arange(order.shape[0], device=order.device)

    def goes_on(left: Tensor, kept: Tensor, *_: Tensor) -> Tensor:
        return left.any()

    def once(left: Tensor, kept: Tensor, corners: Tensor, areas: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        best = left.to(torch.uint8).argmax(0, keepdim=True)
        low = torch.maximum(corners[:, :2], corners[best, :2])
        high = torch.minimum(corners[:, 2:], corners[best, 2:])
        shared = torch.clamp(high - low, min=0.0)
        shared = shared[:, 0] * shared[:, 1]
        overlaps = shared / (areas[best] + areas - shared)
        return left & (places > best) & (overlaps <= iou_threshold), kept | (places == best)

    every = torch.ones_like(order, dtype=torch.bool)
    kept: Tensor = while_loop_op(goes_on, once, (every, ~every), (corners, areas, places))[1]
    return order, kept
