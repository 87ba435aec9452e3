"""Overlaps of rotated boxes, and suppression of boxes, by ATen operators."""

from __future__ import annotations

import struct
import sys
from typing import Any

import torch
from torch import Tensor

from onnxplug import Unsupported, UsageError
from onnxplug.torch_private import scan

#: The distance from an edge within which a point is on it, relative to the boxes' sizes: two boxes' shared edge counts
#: once.
_EDGE = 1e-9


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """``nms`` of mmcv's extension: indices of the kept boxes, by falling score; the threshold is a float there.

    Args:
        boxes: [N, 4], rows of (x1, y1, x2, y2).
        scores: [N]
        iou_threshold: A box that overlaps more is suppressed.
        offset: 1 where a box from 0 to 0 is a pixel wide.
    """
    import torchvision  # noqa: F401

    if offset:
        boxes = torch.cat([boxes[:, :2], boxes[:, 2:] + offset], 1)
    (threshold,) = struct.unpack("f", struct.pack("f", iou_threshold))
    return torch.ops.torchvision.nms(boxes, scores, threshold)


def nms_rotated(
    dets: Tensor, scores: Tensor, iou_threshold: float, labels: Tensor | None = None, clockwise: bool = True
) -> tuple[Tensor, Tensor]:
    """mmcv's function of that name, without a branch on the number of boxes: kept boxes with scores, and their indices.

    Args:
        dets: [N, 5], rows of (x, y, width, height, angle): the middle, and radians.
        scores: [N]
        iou_threshold: A box that overlaps as much or more is suppressed.
        labels: Refused: mmcv's kernel for the CPU suppresses over labels, its kernel for GPUs within a label.
        clockwise: Whether angles turn with the clock.
    """
    if labels is not None:
        raise Unsupported(
            "labels of mmcv's nms_rotated, which its kernels for the CPU and for GPUs treat differently",
            hint="Call mmcv.ops.batched_nms, which moves the boxes of each label to a place of their own.",
        )
    boxes = dets if clockwise else dets * dets.new_tensor([1, 1, 1, 1, -1])
    keep = torch.ops.onnxplug_mmcv.nms_rotated(boxes, scores, float(iou_threshold))
    return torch.cat([dets[keep], scores[keep].reshape(-1, 1)], 1), keep


def soft_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """mmcv's function of that name: boxes by falling score; each lowers the scores of the boxes that it overlaps.

    Args:
        boxes: [N, 4], rows of (x1, y1, x2, y2).
        scores: [N]
        iou_threshold: The least overlap that lowers scores, with ``"naive"`` to 0 and with ``"linear"`` by the overlap.
        sigma: The width of ``"gaussian"``, which lowers scores at any overlap.
        min_score: Boxes whose lowered scores are less are left out.
        method: ``"naive"``, ``"linear"`` or ``"gaussian"``.
        offset: 1 where a box from 0 to 0 is a pixel wide.

    Returns:
        The remaining boxes with their scores, [K, 5], and their indices.
    """
    if method not in ("naive", "linear", "gaussian"):
        raise UsageError(f"soft_nms has no method {method!r}", hint="naive, linear or gaussian")
    # A further box that is never chosen: ONNX Runtime has no scan of length 0.
    rows = torch.cat([boxes.float(), boxes.new_zeros((1, 4), dtype=torch.float32)])
    first = torch.cat([scores.float(), scores.new_zeros(1, dtype=torch.float32)])
    places = torch.arange(rows.shape[0], device=boxes.device)
    areas = (rows[:, 2] - rows[:, 0] + offset) * (rows[:, 3] - rows[:, 1] + offset)

    def step(state: tuple[Tensor, Tensor], _: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        given, left = state
        best = torch.where(left, given, float("-inf")).argmax()
        is_best = places == best
        one, own = (x.index_select(0, best.reshape(1)) for x in (rows, areas))
        sides = rows[:, 2:].minimum(one[:, 2:]) - rows[:, :2].maximum(one[:, :2]) + offset
        shared = sides.clamp(min=0.0).prod(-1)
        overlap = shared / (own + areas - shared)
        if method == "gaussian":
            factor = (-(overlap * overlap) / sigma).exp()
        else:
            lowered = 1.0 - overlap if method == "linear" else torch.zeros_like(overlap)
            factor = torch.where(overlap >= iou_threshold, lowered, 1.0)
        others = left & ~is_best
        now = torch.where(others, given * factor, given)
        chosen = torch.where(left.any(), best, -1)
        return (now, others & ~(now < min_score)), (chosen, given.index_select(0, best.reshape(1)).squeeze(0))

    _, (chosen, values) = scan(step, (first, places < boxes.shape[0]), places)
    kept = chosen >= 0
    inds = chosen[kept]
    return torch.cat([boxes[inds], values[kept].to(boxes.dtype).unsqueeze(1)], 1), inds


def batched_nms(
    boxes: Tensor, scores: Tensor, idxs: Tensor, nms_cfg: dict[str, Any] | None, class_agnostic: bool = False
) -> tuple[Tensor, Tensor]:
    """mmcv's function of that name, without a branch on the number of boxes: all at once, also above ``split_thr``.

    Args:
        boxes: [N, 4], or [N, 5] of rotated boxes.
        scores: [N]
        idxs: [N], the class of each box; boxes of different classes don't suppress one another.
        nms_cfg: ``type``, the name of mmcv's function, with its arguments. ``None``: boxes are sorted by score alone.
        class_agnostic: Whether classes don't matter.
    """
    if nms_cfg is None:
        scores, order = scores.sort(descending=True)
        return torch.cat([boxes[order], scores[:, None]], -1), order
    options = dict(nms_cfg)
    options.pop("split_thr", None)
    moved = boxes
    if not options.pop("class_agnostic", class_agnostic):
        # Minus infinity, so that no boxes have a largest coordinate, too.
        parts = (boxes[..., :2], boxes[..., 2:4]) if boxes.size(-1) == 5 else (boxes,)
        extent = sum(torch.cat([x.flatten(), x.new_full((1,), float("-inf"))]).max() for x in parts)
        offsets = (idxs.to(boxes) * (extent + 1))[:, None]
        moved = torch.cat([boxes[..., :2] + offsets, boxes[..., 2:]], -1) if len(parts) == 2 else boxes + offsets
    function = options.pop("type", "nms")
    if isinstance(function, str):
        function = getattr(sys.modules["mmcv.ops.nms"], function)
    dets, keep = function(moved, scores, **options)
    return torch.cat([boxes[keep], dets[:, -1:]], -1), keep


def box_iou_rotated(bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode_flag: int, aligned: bool) -> None:
    """``box_iou_rotated`` of mmcv's extension, which writes ``ious``.

    Args:
        bboxes1: [N, 5], rows of (x, y, width, height, angle): the middle, and radians.
        bboxes2: [M, 5]
        ious: [N M], or [N] where the boxes are pairs.
        mode_flag: 0 for intersections over unions, 1 over the first box.
        aligned: Whether the boxes are pairs.
    """
    ious.copy_(overlaps(bboxes1 if aligned else bboxes1.unsqueeze(1), bboxes2, mode_flag == 1).flatten())


def kept_rotated(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """``onnxplug_mmcv::nms_rotated``: indices of the kept rotated boxes, by falling score."""
    order = scores.sort(descending=True, stable=True).indices
    # A further box without an area: ONNX Runtime has no scan of length 0.
    boxes = torch.cat([dets[order].double(), dets.new_zeros((1, 5), dtype=torch.float64)])
    places = torch.arange(boxes.shape[0], device=dets.device)

    def step(kept: Tensor, one: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        box, place = one
        # As in mmcv's kernel, the threshold is a float, and an equal overlap is suppressed.
        near = overlaps(box, boxes, False).float() >= iou_threshold
        own = (kept & (places == place)).any()
        return kept & ~(own & near & (places > place)), own.clone()

    kept, _ = scan(step, torch.ones_like(places, dtype=torch.bool), (boxes, places))
    return order[kept[:-1]]


def overlaps(one: Tensor, other: Tensor, of_one: bool) -> Tensor:
    """Intersections over unions, or over the first boxes, of broadcast boxes [..., 5]; 0 where a box has no area.

    The area of an intersection is the integral over its border, the parts of each box's edges in the other box. It is
    computed in double, as the library's way, which sorts corners by their angles, gives another result for rounded
    corners.
    """
    dtype = one.dtype
    one, other = one.double(), other.double()
    middle = (one[..., :2] + other[..., :2]) / 2
    one, other = (
        torch.cat([box[..., :2] - middle, box[..., 2:].expand(*middle.shape[:-1], 3)], -1) for box in (one, other)
    )
    areas = [box[..., 2] * box[..., 3] for box in (one, other)]
    near = (one[..., 2:4].sum(-1) + other[..., 2:4].sum(-1)) * _EDGE
    shared = (_border(one, other, near, 1) + _border(other, one, near, -1)).clamp(min=0.0)
    total = areas[0] if of_one else areas[0] + areas[1] - shared
    return torch.where((areas[0] < 1e-14) | (areas[1] < 1e-14), 0.0, shared / total).to(dtype)


def _border(one: Tensor, other: Tensor, near: Tensor, once: int) -> Tensor:
    """Half the integral of ``x dy - y dx`` along the edges of one box within the other box and a margin around it.

    Of two edges on one line, one is counted where they run the same way (``once`` is -1 for the box whose edge isn't
    counted), and both, which cancel, where the boxes touch from opposite sides.
    """
    x, y, width, height, angle = one.unsqueeze(-1).unbind(-2)
    sine, cosine = angle.sin(), angle.cos()
    right, down = (width / 2 * x.new_tensor([-1, 1, 1, -1]), height / 2 * x.new_tensor([-1, -1, 1, 1]))
    x, y = x + right * cosine - down * sine, y + right * sine + down * cosine
    dx, dy = (torch.cat([v[..., 1:], v[..., :1]], -1) - v for v in (x, y))
    x0, y0, width, height, angle = other.unsqueeze(-1).unbind(-2)
    sine, cosine = angle.sin(), angle.cos()
    places = ((x - x0) * cosine + (y - y0) * sine, (y - y0) * cosine - (x - x0) * sine)
    speeds = (dx * cosine + dy * sine, dy * cosine - dx * sine)
    first, last = torch.zeros_like(x), torch.ones_like(x)
    # The other box's border runs along its height at the ends of its width, and against its width at the ends of its
    # height.
    for place, speed, along, size in zip(places, speeds, (speeds[1], -speeds[0]), (width, height), strict=True):
        ends = []
        for side in (-1, 1):
            margin = near.unsqueeze(-1) * torch.where(along * side > 0, once, 1)
            ends.append((side * (size / 2 + margin) - place) / speed)
        first, last = first.maximum(ends[0].minimum(ends[1])), last.minimum(ends[0].maximum(ends[1]))
    return ((last - first).clamp(min=0.0) * (x * dy - y * dx)).sum(-1) / 2
