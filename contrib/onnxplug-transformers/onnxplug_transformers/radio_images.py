"""C-RADIO's images, of any size or packed in one row with their sizes as an input, while a model is captured.

transformers resizes the square table of positions to each image's longer side, and cuts it, in a loop over the images. Each image
in a row has tokens of its class before its patches. Sizes that transformers refuses are an index out of range in the
exported model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import exchanged, never
from onnxplug_transformers.packed_images import PACKED, States, images_of, in_whole_windows, is_packed_or

_MODULE = "transformers.models.radio.modeling_radio"
_FLASH = "is_flash_attention_requested"


@contextlib.contextmanager
def radio_images_of_any_size() -> Iterator[None]:
    """Holds while a model is captured."""
    with contextlib.ExitStack() as stack:
        module = sys.modules[_MODULE]
        if before := getattr(module, _FLASH, None):
            stack.enter_context(patched(module, _FLASH, is_packed_or(before)))
        stack.enter_context(
            exchanged(
                {
                    "RadioPatchEmbeddings._interpolate_position_embedding": (positions, never),
                    "RadioPatchEmbeddings._embed_packed_patches": (packed_embeddings, never),
                    "RadioModel._forward_packed": (packed_states, _has_other_attention),
                    "NemotronH_Omni_Reasoning_V3.get_image_features": (features, _has_other_tokens),
                }
            )
        )
        yield


def _has_other_attention(self: Any, *_: Any, **__: Any) -> bool:
    return self.config._attn_implementation not in ("eager", "sdpa")


def _has_other_tokens(self: Any, *_: Any, **__: Any) -> bool:
    """Whether tokens are other than squares of two by two patches, by which transformers splits all images' tokens."""
    return bool(self.config.downsample_ratio != 0.5)


def _table(self: Any) -> Tensor:
    return self.position_embedding.reshape(1, self.max_rows, self.max_cols, -1).permute(0, 3, 1, 2).float()


def positions(self: Any, input_dims: tuple[Any, Any], dtype: torch.dtype) -> Tensor:
    """Positions of images of one size, [1, patches, width]: the table resized to the longer side, and cut."""
    height, width = input_dims
    side = torch.sym_max(height, width)
    resized = functional.interpolate(_table(self), size=(side, side), mode="bilinear", align_corners=False).to(dtype)
    return resized[:, :, :height, :width].flatten(2).permute(0, 2, 1)


def _resized(table: Tensor, row: Tensor, column: Tensor, side: Tensor) -> Tensor:
    """A table [1, width, rows, columns] resized to squares of ``side``, at some rows and columns, [cells, width].

    Bilinear without antialiasing, as ``torch.nn.functional.interpolate``: the four cells around the place in the table.
    """
    ends = []
    for place, count in zip((row, column), table.shape[2:], strict=True):
        source = ((place + 0.5) * (count / side.float()) - 0.5).clamp(min=0)
        first = source.long().clamp(max=count - 1)
        part = source - first
        ends.append(((first, 1 - part), ((first + 1).clamp(max=count - 1), part)))
    cells = table[0].permute(1, 2, 0)
    rows, columns = ends
    below, above = (sum(cells[y, x] * weight[:, None] for x, weight in columns) * share[:, None] for y, share in rows)
    return below + above


def packed_embeddings(self: Any, pixel_values: Tensor, image_grid_hw: Tensor) -> Tensor:
    """Each image's tokens of its class, and its patches with their positions, [1, tokens, width]."""
    patches = self.patch_projection(pixel_values)
    _, sizes, place = images_of(image_grid_hw, patches.shape[0], 1)
    row, column = place // sizes[:, 1], place % sizes[:, 1]
    placed = patches + _resized(_table(self), row, column, sizes.amax(-1)).to(patches.dtype)
    prefix, images = self.cls_register_token, image_grid_hw.shape[0]
    before = prefix.shape[0]
    ends = (image_grid_hw.prod(-1) + before).cumsum(0)
    token = torch.arange(patches.shape[0] + images * before, device=ends.device)
    image = (token[:, None] >= ends).sum(-1)
    within = token - (ends - image_grid_hw.prod(-1) - before)[image]
    source = within.where(within < before, token - image * before)
    return torch.cat([prefix, placed])[source][None]


def packed_states(self: Any, pixel_values: Tensor, image_grid_hw: Tensor, **kwargs: Any) -> Any:
    """RadioModel's results for images in one row; the patches of an image see no other image."""
    config, before = self.config, self.config.num_summary_tokens
    squares = pixel_values.view(-1, config.num_channels, config.patch_size, config.patch_size)
    patches = self.input_conditioner(squares).flatten(1)
    states = self.embeddings(patches, image_grid_hw)
    bounds = functional.pad((image_grid_hw.prod(-1) + before).cumsum(0), (1, 0))
    token = PACKED.set((states.shape[1], {}))
    try:
        encoded = self.encoder(states, cu_seqlens=bounds.to(torch.int32), **kwargs)
    finally:
        PACKED.reset(token)
    last = encoded.last_hidden_state[0]
    image, _, _ = images_of(image_grid_hw, patches.shape[0], 1)
    place = torch.arange(patches.shape[0], device=image.device) + (image + 1) * before
    return sys.modules[_MODULE].RadioModelOutput(
        summary=last[bounds[:-1, None] + self.summary_idxs].flatten(1),
        features=last[place],
        last_hidden_state=last,
        hidden_states=encoded.hidden_states,
        attentions=encoded.attentions,
    )


@can_return_tuple
def features(self: Any, pixel_values: Tensor, image_grid_hw: Tensor, **kwargs: Any) -> Any:
    """Nemotron H Omni's tokens of all images, of two by two patches each."""
    pixel_values = pixel_values.to(dtype=self.vision_model.config.torch_dtype)
    outputs = self.vision_model(pixel_values, image_grid_hw=image_grid_hw, **kwargs)
    patches = outputs.features
    if self.vision_final_layernorm is not None:
        patches = self.vision_final_layernorm(patches)
    tokens = patches[in_whole_windows(image_grid_hw, patches.shape[0], (2, 2))].flatten(1)
    of_images: Any = States((self.multi_modal_projector(tokens),))
    return BaseModelOutputWithPooling(
        last_hidden_state=outputs.last_hidden_state,
        pooler_output=of_images,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
