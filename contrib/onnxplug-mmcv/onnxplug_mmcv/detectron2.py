"""detectron2's operators by PyTorch's, and its masks in an image: angles are in degrees and turn against the clock."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.patching import patched
from onnxplug_mmcv.boxes import overlaps
from onnxplug_mmcv.library import define

EXTENSION = "detectron2._C"


def nms_rotated(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the kept rotated boxes, by falling score.

    Args:
        dets: [N, 5], rows of (x, y, width, height, angle): the middle, and degrees.
        scores: [N]
        iou_threshold: A box that overlaps as much or more is suppressed.
    """
    define()
    return torch.ops.onnxplug_mmcv.nms_rotated(_turned(dets), scores, float(iou_threshold))


def box_iou_rotated(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """Overlaps of rotated boxes, [N, M].

    Args:
        boxes1: [N, 5], rows as of :func:`nms_rotated`.
        boxes2: [M, 5]
    """
    return overlaps(_turned(boxes1).unsqueeze(1), _turned(boxes2), False)


def roi_align_rotated_forward(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int
) -> Tensor:
    """Averages of bins of rotated regions, [K, C, pooled_height, pooled_width].

    Args:
        input: [N, C, H, W]
        rois: [K, 6], rows of (batch, x, y, width, height, angle): the middle, and degrees.
        spatial_scale: The factor from the regions' unit to pixels of ``input``.
        pooled_height, pooled_width: The bins of a region.
        sampling_ratio: Samples of a bin along each axis; as many as it has pixels where it is 0.
    """
    define()
    rois = torch.cat([rois[:, :5], rois[:, 5:] * (math.pi / 180)], 1)
    sizes = (pooled_height, pooled_width, float(spatial_scale), sampling_ratio)
    return torch.ops.onnxplug_mmcv.roi_align_rotated(input, rois, *sizes, aligned=True, clockwise=False)


def paste_masks_in_image(masks: Tensor, boxes: Any, image_shape: tuple[int, int], threshold: float = 0.5) -> Tensor:
    """detectron2's function of that name, of all masks at once: [N, height, width], also where there are none.

    Args:
        masks: [N, size, size], from 0 to 1.
        boxes: ``Boxes``, or [N, 4] rows of (x1, y1, x2, y2): where each mask is in the image.
        image_shape: Height and width.
        threshold: The least value of a pixel in the mask; below 0, the results are uint8 up to 255.
    """
    corners = boxes if isinstance(boxes, Tensor) else boxes.tensor
    masks = masks if masks.dtype.is_floating_point else masks.float()
    places, seen = [], []
    for axis, size in enumerate(reversed(image_shape)):
        first, last = corners[:, axis : axis + 1], corners[:, axis + 2 : axis + 3]
        pixels = torch.arange(size, device=corners.device)
        places.append((pixels + 0.5 - first) / (last - first) * 2 - 1)
        # On a CPU detectron2 computes only these pixels, up to one beside the box.
        seen.append((pixels >= first.floor() - 1) & (pixels < last.ceil() + 1))
    across, down = places[0][:, None, :], places[1][:, :, None]
    grid = torch.stack(torch.broadcast_tensors(across, down), 3).to(masks.dtype)
    image = torch.nn.functional.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]
    if corners.device.type == "cpu":
        image = torch.where(seen[0][:, None, :] & seen[1][:, :, None], image, -1.0)
    return image >= threshold if threshold >= 0 else (image.clamp(min=0) * 255).to(torch.uint8)


def _turned(rows: Tensor) -> Tensor:
    """Rotated boxes with angles in radians that turn with the clock."""
    return torch.cat([rows[:, :4], rows[:, 4:] * (-math.pi / 180)], 1)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "nms_rotated": nms_rotated,
    "box_iou_rotated": box_iou_rotated,
    "roi_align_rotated_forward": roi_align_rotated_forward,
}


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """A context for a capture in which the operators are exchanged.

    detectron2 registers them without shapes, and older versions call them in its extension.
    """
    define()
    places = [torch.ops.detectron2, *([sys.modules[EXTENSION]] if EXTENSION in sys.modules else [])]
    with contextlib.ExitStack() as stack:
        for place in places:
            for name, kernel in KERNELS.items():
                if hasattr(place, name):
                    stack.enter_context(patched(place, name, kernel))
        yield
