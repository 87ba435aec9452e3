"""``torchvision:NAME`` on the command line."""

from __future__ import annotations

from typing import Any

import torch

from onnxplug import OnnxplugError, UsageError

#: Frames of a video in an example, at least.
_FRAMES = 8
#: Height and width of an image where the weights do not give them: all models of torchvision take this size.
_SIDE = 224


def load(name: str, *, pretrained: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A model of torchvision's list, and images of the size that its weights were trained for.

    Args:
        name: As in ``torchvision.models.list_models()``.
        pretrained: The default weights, which torchvision downloads at first use; otherwise random weights.

    Returns:
        The model, and its positional inputs: [2, 3, height, width] images; for detection a list of one image; for video
        [2, 3, frames, height, width]; for optical flow two batches of images.

    Raises:
        UsageError: torchvision has no such model.
        OnnxplugError: The weights can't be loaded.
    """
    from torchvision import models

    if name not in models.list_models():
        raise UsageError(f"torchvision has no model {name!r}", hint="torchvision.models.list_models() lists them.")
    weights = models.get_model_weights(name).DEFAULT
    try:
        if pretrained:
            model = models.get_model(name, weights=weights)
        else:
            extra = {"weights_backbone": None} if _has_backbone(name) else {}
            model = models.get_model(name, weights=None, **extra)
    except Exception as error:
        if not pretrained:
            raise
        raise OnnxplugError(
            f"torchvision can't load the trained weights of {name}: {type(error).__name__}: {error}",
            hint="They are downloaded at first use. Without --pretrained the weights are random.",
        ) from error
    return model.eval(), _example(name, weights)


def _kind(name: str) -> str:
    """The part of ``torchvision.models`` that a model is of: ``detection``, ``video``, ..."""
    from torchvision import models

    return models.get_model_builder(name).__module__.split(".")[2]


def _has_backbone(name: str) -> bool:
    return _kind(name) in ("detection", "segmentation")


def _example(name: str, weights: Any) -> tuple[Any, ...]:
    transforms = weights.transforms()
    crop = list(getattr(transforms, "crop_size", None) or [])
    least = max(weights.meta.get("min_size") or (1, 1))
    side = crop[0] if crop else max(_SIDE, least)
    height, width = (crop[0], crop[-1]) if crop else (side, side)
    kind = _kind(name)
    if kind == "detection":
        return ([torch.rand(3, height, width)],)
    if kind == "video":
        frames = weights.meta.get("min_temporal_size") or _FRAMES
        return (torch.randn(2, 3, max(frames, _FRAMES), height, width),)
    if kind == "optical_flow":
        return (torch.rand(2, 3, height, width), torch.rand(2, 3, height, width))
    return (torch.randn(2, 3, height, width),)
