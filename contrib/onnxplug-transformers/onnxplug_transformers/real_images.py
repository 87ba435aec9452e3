"""Rows of images of which some are padding (Idefics2, Idefics3, SmolVLM, ModernVBERT), while a model is captured.

transformers leaves out images of zeros, splits the features of the others by the rows of the batch in a loop, and joins them
again. Here they stay together, and the places of the images are computed once for the pixels and their mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from onnxplug_transformers.exchanged import exchanged, never
from onnxplug_transformers.packed_images import States


@contextlib.contextmanager
def any_number_of_real_images() -> Iterator[None]:
    """Holds while a model is captured."""
    method = "get_image_features"
    with exchanged(
        {
            f"Idefics2Model.{method}": (features, never),
            f"Idefics3Model.{method}": (features, never),
            f"SmolVLMModel.{method}": (features_with_one, never),
            f"ModernVBertModel.{method}": (features_with_one, never),
        }
    ):
        yield


def _places(pixel_values: Tensor, *, keeps_first: bool) -> Tensor:
    """The numbers of the images that are no padding, [real images], at least one.

    Args:
        pixel_values: [images, channels, height, width].
        keeps_first: Whether the first image is taken where all are padding. Otherwise transformers refuses such images, and the
            number is an index out of range.
    """
    is_real = (pixel_values != 0).flatten(1).any(1)
    first = is_real[0] | ~is_real.any()
    places = torch.cat([first[None], is_real[1:]]).nonzero().squeeze(1)
    torch._check(places.shape[0] >= 1)
    return places if keeps_first else places.where(is_real.any(), is_real.shape[0])


def _features(
    model: Any, pixel_values: Tensor, pixel_attention_mask: Tensor | None, kwargs: dict[str, Any], *, keeps_first: bool
) -> Any:
    """The encoder's outputs for the real images, with the tokens of all images together, [images * tokens, width].

    Args:
        model: The model of images and text.
        pixel_values: [batch, images, channels, height, width].
        pixel_attention_mask: [batch, images, height, width], 0 for padding; all pixels are shown without it.
        kwargs: For the encoder.
        keeps_first: As in :func:`_places`.
    """
    batch, images = pixel_values.shape[:2]
    pixels = pixel_values.to(model.dtype).view(batch * images, *pixel_values.shape[2:])
    places = _places(pixels, keeps_first=keeps_first)
    pixels = pixels[places]
    if pixel_attention_mask is None:
        mask = torch.ones_like(pixels[:, 0], dtype=torch.bool)
    else:
        mask = pixel_attention_mask.view(batch * images, *pixel_attention_mask.shape[2:])[places]
    side = model.config.vision_config.patch_size
    shown = mask.unfold(1, side, side).unfold(2, side, side).sum((-1, -2))
    is_resampled = hasattr(model.connector, "perceiver_resampler")
    is_shown = shown == side * side if is_resampled else shown > 0
    kwargs = {**kwargs, "return_dict": True}
    outputs = model.vision_model(pixel_values=pixels, patch_attention_mask=is_shown, **kwargs)
    given = {"attention_mask": is_shown.flatten(1)} if is_resampled else {}
    outputs.pooler_output = States((model.connector(outputs.last_hidden_state, **given).flatten(0, 1),))
    return outputs


@can_return_tuple
def features(self: Any, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """As transformers' own of a model that refuses images that are all padding."""
    return _features(self, pixel_values, pixel_attention_mask, kwargs, keeps_first=False)


@can_return_tuple
def features_with_one(self: Any, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """As transformers' own of a model that takes the first image where all are padding."""
    return _features(self, pixel_values, pixel_attention_mask, kwargs, keeps_first=True)
