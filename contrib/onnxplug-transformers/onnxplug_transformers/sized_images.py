"""Images padded to one size, whose own sizes are an input (Pixtral and the models with its encoder), while a model is captured.

transformers cuts each image's patches out in a loop over the images, puts them in one row, and merges squares of them in another
loop. Here a mask chooses the patches, and their images and places follow from it. Sizes that transformers refuses are an index out
of range in the exported model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from onnxplug_transformers.exchanged import exchanged
from onnxplug_transformers.packed_images import PACKED, States


@contextlib.contextmanager
def sized_images_of_any_number() -> Iterator[None]:
    """Holds while a model is captured."""
    mergers = (f"{name}PatchMerger.forward" for name in ("Mistral3", "MistralLarge4", "LightOnOcr"))
    with exchanged(
        {
            "PixtralVisionModel.forward": (states, _is_other_encoder),
            "LightOnOcrModel.get_image_features": (features, _are_other_sizes),
            **dict.fromkeys(mergers, (merged, _are_other_sizes)),
        }
    ):
        yield


def _are_numbers(sizes: Any) -> bool:
    """Whether sizes are a tensor of integers, of any number of images."""
    return isinstance(sizes, Tensor) and not sizes.dtype.is_floating_point and sizes.dtype != torch.bool


def _is_other_encoder(self: Any, pixel_values: Tensor, image_sizes: Any = None, **_: Any) -> bool:
    is_known = image_sizes is None or _are_numbers(image_sizes)
    return not is_known or self.config._attn_implementation not in ("eager", "sdpa")


def _are_other_sizes(self: Any, *args: Any, **kwargs: Any) -> bool:
    return not _are_numbers(args[1] if len(args) > 1 else kwargs.get("image_sizes"))


@merge_with_config_defaults
@capture_outputs
def states(self: Any, pixel_values: Tensor, image_sizes: Tensor | None = None, **kwargs: Any) -> Any:
    """PixtralVisionModel's states of the patches of all images in one row, [1, patches, width].

    Args:
        pixel_values: [images, channels, height, width].
        image_sizes: Height and width of each image, [images, 2]; further rows are ignored. ``None``: an image has all
            its pixels.
    """
    embeds = self.patch_conv(pixel_values.to(dtype=self.patch_conv.weight.dtype))
    count, _, rows, columns = embeds.shape
    grid = [torch.arange(length, device=embeds.device) for length in (count, rows, columns)]
    if image_sizes is None:
        image, row, column = (x.flatten() for x in torch.meshgrid(*grid, indexing="ij"))
        counts = torch.full((count,), rows * columns, device=embeds.device)
        patches = embeds.permute(0, 2, 3, 1).flatten(0, 2)
    else:
        given = torch.ones_like(image_sizes[:, 0]).sum().to(embeds.device)
        sizes = image_sizes.to(embeds.device)[grid[0].where(given >= count, image_sizes.shape[0])] // self.patch_size
        height, width = (_cut(sizes[:, axis], length) for axis, length in enumerate((rows, columns)))
        is_there = (grid[1][:, None] < height[:, None, None]) & (grid[2] < width[:, None, None])
        image, row, column = is_there.nonzero(as_tuple=True)
        counts = height * width
        patches = embeds.permute(0, 2, 3, 1)[image, row, column]
    patches = self.ln_pre(patches[None])
    turns = self.patch_positional_embedding(patches, torch.stack([row, column], -1))
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    token = PACKED.set((None, {}))
    try:
        return self.transformer(
            patches,
            attention_mask=None,
            position_embeddings=turns,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            **kwargs,
        )
    finally:
        PACKED.reset(token)


def _cut(end: Tensor, length: Any) -> Tensor:
    """How many of ``length`` places lie before an end, as in a slice: a negative end counts from behind."""
    return end.where(end >= 0, end + length).clamp(min=0).minimum(end.new_full((), length))


def whole_squares(sizes: Tensor, side: int, patches: Any) -> Tensor:
    """The patches of each whole square of images in one row, [squares, side * side], row by row; the rest is left out.

    Where an image has no square, or the images don't have ``patches`` patches in all, the places are out of range.

    Args:
        sizes: Rows and columns of each image, [images, 2].
        side: Rows and columns of a square.
        patches: The number of patches in all.
    """
    counts, squares = sizes.prod(-1), sizes // side
    ends = squares.prod(-1).cumsum(0)
    number = torch.arange(squares.clamp(min=0).prod(-1).sum().item(), device=ends.device)
    image = (number[:, None] >= ends).sum(-1)
    place, width, columns = number - (ends - squares.prod(-1))[image], sizes[image, 1], squares[image, 1]
    first = (counts.cumsum(0) - counts)[image] + (place // columns * width + place % columns) * side
    within = torch.arange(side, device=ends.device)
    places = first[:, None] + (within[:, None] * width[:, None, None] + within).flatten(1)
    fits = (sizes >= side).all() & (counts.sum() == patches)
    return places.where(fits, patches)


def merged(self: Any, image_features: Tensor, image_sizes: Tensor) -> Tensor:
    """A token of each whole square of an image's patches, [tokens, width], from all images' patches, [patches, width]."""
    sizes = image_sizes.to(image_features.device)[:, :2] // self.patch_size
    places = whole_squares(sizes, self.spatial_merge_size, image_features.shape[0])
    gathered = image_features[places]
    result: Tensor = self.merging_layer(gathered.transpose(1, 2).flatten(1))
    return result


@can_return_tuple
def features(self: Any, pixel_values: Tensor, image_sizes: Tensor, **kwargs: Any) -> Any:
    """LightOnOCR's tokens of all images together."""
    outputs = self.vision_encoder(pixel_values, image_sizes=image_sizes, return_dict=True, **kwargs)
    outputs.pooler_output = States((self.vision_projection(outputs.last_hidden_state.squeeze(0), image_sizes),))
    return outputs
