"""Patches of torchvision's detection models while torch.export captures a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision

from onnxplug.capture.patching import patched
from onnxplug_torchvision.resampled import heatmaps_to_keypoints, paste_masks_in_image


def batched_nms(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """torchvision's ``batched_nms`` without a branch on the number of boxes.

    Every class is moved to a place of its own, as torchvision does up to 1000 boxes, and always while tracing;
    for more boxes torchvision suppresses class by class, which differs by rounding.
    """
    # Without a box the largest coordinate is -inf.
    flat = torch.cat([boxes.flatten(), boxes.new_full((1,), float("-inf"))])
    offsets = idxs.to(boxes) * (flat.max() + 1)
    return torchvision.ops.boxes.nms(boxes + offsets[:, None], scores, iou_threshold)


def length(x: Any) -> Any:
    """``len`` that leaves a tensor's size symbolic; the builtin asks for its value."""
    return x.shape[0] if isinstance(x, torch.Tensor) else len(x)


def _decode_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def decode(coder: Any, rel_codes: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        """``BoxCoder.decode``: [boxes, classes, 4], without boxes too; torchvision then has [0, classes * 4]."""
        if rel_codes.dim() != 2:
            return original(coder, rel_codes, boxes)
        decoded: torch.Tensor = coder.decode_single(rel_codes, torch.cat(boxes))
        return decoded.unflatten(1, (decoded.shape[1] // 4, 4))

    return decode


@contextlib.contextmanager
def detection() -> Iterator[None]:
    """A context for a capture in which torchvision does not branch on the number of boxes, only known at run time."""
    from torchvision.models.detection import _utils, roi_heads, transform
    from torchvision.ops import boxes, poolers

    changes: list[tuple[Any, str, Any]] = [
        (boxes, "batched_nms", batched_nms),
        (torchvision.ops, "batched_nms", batched_nms),
        (_utils.BoxCoder, "decode", _decode_of(_utils.BoxCoder.decode)),
        (transform, "paste_masks_in_image", paste_masks_in_image),
        (roi_heads, "heatmaps_to_keypoints", heatmaps_to_keypoints),
        (poolers, "len", length),  # the module's global goes before the builtin
    ]
    with contextlib.ExitStack() as stack:
        for home, name, new in changes:
            stack.enter_context(patched(home, name, new))
        yield
