"""Rows of images of which some are padding (Idefics2, Idefics3, SmolVLM, ModernVBERT), while a model is captured.

transformers leaves out images of zeros, splits the features of the others by the rows of the batch in a loop, and joins
them again. Here the features stay together where the batch is dynamic; the places of the images are computed once for
pixels and mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import can_return_tuple

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


def _are_real(pixel_values: Tensor) -> Tensor:
    """True for images [images, channels, height, width] that are no padding, or for the first if all are, [images]."""
    is_real = (pixel_values != 0).flatten(1).any(1)
    first = is_real[0] | ~is_real.any()
    return torch.cat([first[None], is_real[1:]])


def _features(
    model: Any,
    pixel_values: Tensor,
    pixel_attention_mask: Tensor | None,
    kwargs: dict[str, Any],
    *,
    takes_padding: bool,
) -> Any:
    """The encoder's outputs for the real images, and the tokens of each row of the batch, [tokens, width].

    Args:
        model: The model of images and text.
        pixel_values: [batch, images, channels, height, width].
        pixel_attention_mask: [batch, images, height, width], 0 for padding; all pixels are shown without it.
        kwargs: For the encoder.
        takes_padding: Whether transformers accepts images that are all padding, and takes the first of them. Otherwise
            such images are an index out of range.
    """
    batch, images = pixel_values.shape[:2]
    pixels = pixel_values.to(model.dtype).view(batch * images, *pixel_values.shape[2:])
    is_taken = _are_real(pixels)
    places = is_taken.nonzero().squeeze(1)
    torch._check(places.shape[0] >= 1)
    if not takes_padding:
        places = places.where((pixels != 0).any(), batch * images)
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
    tokens = model.connector(outputs.last_hidden_state, **given)
    if isinstance(batch, int):
        counts = is_taken.view(batch, images).sum(1).tolist()
        outputs.pooler_output = [of_row.flatten(0, 1) for of_row in tokens.split(counts)]
    else:
        outputs.pooler_output = States((tokens.flatten(0, 1),))
    return outputs


@can_return_tuple
def features(self: Any, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """The features of a model that refuses images that are all padding."""
    return _features(self, pixel_values, pixel_attention_mask, kwargs, takes_padding=False)


@can_return_tuple
def features_with_one(
    self: Any, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """The features of a model that takes the first image where all are padding."""
    return _features(self, pixel_values, pixel_attention_mask, kwargs, takes_padding=True)
