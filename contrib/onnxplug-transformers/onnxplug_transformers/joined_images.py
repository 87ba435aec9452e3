"""Images whose tokens models list image by image, and join at once, while a model is captured: any number of images.

DeepSeek-OCR 2, Unlimited-OCR and Step 3.7 have the tokens of an image's parts before those of the whole image. Numbers
of parts in a tensor may be any; numbers in a list are fixed to the example's. Numbers that don't fit the images or the
parts are an index out of range in the exported model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import exchanged, in_use, modeling_of
from onnxplug_transformers.packed_images import States


@contextlib.contextmanager
def joined_images_of_any_number() -> Iterator[None]:
    """Holds while a model is captured."""
    name = "get_image_features"
    with contextlib.ExitStack() as stack:
        for owner, _, _ in in_use(f"LlavaModel.{name}"):
            stack.enter_context(patched(sys.modules[owner.__module__], "list", _listed))
        stack.enter_context(
            exchanged(
                {
                    f"DeepseekOcr2Model.{name}": (separated, _are_of_one_call),
                    f"UnlimitedOcrModel.{name}": (with_ends_of_rows, _have_parts),
                    f"Step3p7Model.{name}": (after_parts, _are_counted_otherwise),
                }
            )
        )
        yield


def _is_static(pixel_values: Tensor) -> bool:
    return not isinstance(pixel_values.shape[0], torch.SymInt)


def _are_of_one_call(
    self: Any, pixel_values: Tensor, pixel_values_local: Any = None, num_local_patches: Any = None, **_: Any
) -> bool:
    has_list = pixel_values_local is not None and not isinstance(num_local_patches, Tensor)
    return _is_static(pixel_values) or has_list


def _have_parts(self: Any, pixel_values: Tensor, pixel_values_local: Any = None, *_: Any, **__: Any) -> bool:
    return _is_static(pixel_values) or pixel_values_local is not None


def _are_counted_otherwise(
    self: Any, pixel_values: Tensor, pixel_values_local: Any = None, num_local_patches: Any = None, **_: Any
) -> bool:
    is_known = num_local_patches is None or (isinstance(num_local_patches, Tensor) and pixel_values_local is not None)
    return _is_static(pixel_values) or not is_known


def _listed(images: Any = ()) -> Any:
    """Stands for ``list`` in a module: the rows of any number of images stay together."""
    if not isinstance(images, Tensor) or images.dim() < 2 or _is_static(images):
        return list(images)
    return States((images.flatten(0, 1),))


def _with_parts(parts: Tensor, numbers: Tensor, whole: Tensor) -> Tensor:
    """The tokens of each image after those of its parts, [tokens, width].

    Args:
        parts: [parts of all images, tokens of a part, width].
        numbers: How many parts each image has, [images].
        whole: [images, tokens of an image, width].
    """
    (count, of_part, _), (images, of_image, _) = parts.shape, whole.shape
    tokens = torch.cat([parts.flatten(0, 1), whole.flatten(0, 1)])
    total = count * of_part + images * of_image
    number = numbers.to(whole.device)[torch.arange(images, device=whole.device)]
    ends = number.cumsum(0)
    of_parts, of_images = (torch.arange(size, device=whole.device) for size in (count * of_part, images * of_image))
    before = ((of_parts // of_part)[:, None] >= ends).sum(-1)
    places = torch.cat([of_parts + before * of_image, of_images + ends[of_images // of_image] * of_part])
    order = torch.zeros_like(places).scatter(0, places.clamp(0, total - 1), torch.arange(total, device=whole.device))
    fits = (numbers >= 0).all() & (ends[-1:] == count).all() & (torch.ones_like(numbers).sum() == images)
    return tokens[order.where(fits.to(whole.device), total)]


def _results(kind: Any, outputs: Any, tokens: Tensor, **further: Any) -> Any:
    return kind(
        last_hidden_state=outputs.last_hidden_state,
        pooler_output=States((tokens,)),
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        **further,
    )


def _behind(tokens: Tensor, vector: Tensor) -> Tensor:
    """The tokens and a vector as one more token behind them, [..., tokens + 1, width]."""
    return torch.cat([tokens, vector.to(tokens.device).expand(*tokens.shape[:-2], 1, -1)], -2)


@can_return_tuple
def separated(
    self: Any,
    pixel_values: Tensor,
    pixel_values_local: Tensor | None = None,
    num_local_patches: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """DeepSeek-OCR 2's tokens of all images: of an image's parts, of the whole image, and a separator."""
    kind = modeling_of(self).DeepseekOcr2ModelOutputWithPooling
    outputs = self.vision_tower(pixel_values, **kwargs)
    tokens = _behind(self.multi_modal_projector(outputs.last_hidden_state), self.view_separator)
    if pixel_values_local is None or num_local_patches is None:
        return _results(kind, outputs, tokens.flatten(0, 1))
    of_parts = self.vision_tower(pixel_values_local, **kwargs)
    return _results(
        kind,
        outputs,
        _with_parts(self.multi_modal_projector(of_parts.last_hidden_state), num_local_patches, tokens),
        local_last_hidden_state=of_parts.last_hidden_state,
        local_hidden_states=of_parts.hidden_states,
        local_attentions=of_parts.attentions,
    )


@can_return_tuple
def with_ends_of_rows(
    self: Any,
    pixel_values: Tensor,
    pixel_values_local: None = None,
    num_local_patches: Any = None,
    patches_grid: Any = None,
    **kwargs: Any,
) -> Any:
    """Unlimited-OCR's tokens of all images without parts, with a token at the end of each row and of each image."""
    kind = modeling_of(self).UnlimitedOcrModelOutputWithPooling
    outputs = self.vision_tower(pixel_values, **kwargs)
    projected = self.multi_modal_projector(outputs.last_hidden_state)
    side = int(projected.shape[1] ** 0.5)
    rows = _behind(projected.unflatten(1, (side, side)), self.image_newline)
    return _results(kind, outputs, _behind(rows.flatten(1, 2), self.view_separator).flatten(0, 1))


@can_return_tuple
def after_parts(
    self: Any,
    pixel_values: Tensor,
    pixel_values_local: Tensor | None = None,
    num_local_patches: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Step 3.7's tokens of all images: of an image's parts, and of the whole image."""
    outputs = self.vision_model(pixel_values, **kwargs)
    tokens = self.multi_modal_projector(outputs.last_hidden_state)
    if pixel_values_local is None or num_local_patches is None:
        return _results(BaseModelOutputWithPooling, outputs, tokens.flatten(0, 1))
    of_parts = self.vision_model(pixel_values_local, **{**kwargs, "output_hidden_states": False})
    parts = self.multi_modal_projector(of_parts.last_hidden_state)
    return _results(BaseModelOutputWithPooling, outputs, _with_parts(parts, num_local_patches, tokens))
