"""Images of any size whose patches are padded to one number (SigLIP 2's NaFlex), while a model is captured.

transformers loops over the images, and resizes its square table of positions for each. Here the weights of the table's cells are
computed for the row and column of each patch. Sizes that transformers refuses are an index out of range in the exported model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug_transformers.exchanged import exchanged, never
from onnxplug_transformers.packed_images import (
    States,
    get_vision_position_ids,
    images_of,
    in_whole_windows,
    is_not_packed,
    number_of_patches,
)


@contextlib.contextmanager
def padded_images_of_any_size() -> Iterator[None]:
    """Holds while a model is captured."""
    resize = "resize_positional_embeddings"
    with exchanged(
        {
            f"Siglip2VisionEmbeddings.{resize}": (padded_positions, never),
            f"Cosmos3EdgeVisionEmbeddings.{resize}": (packed_positions, is_not_packed),
            "Lfm2VlModel.get_image_features": (features, never),
        }
    ):
        yield


def _weights(place: Tensor, size: Tensor, count: int) -> Tensor:
    """The weights of ``count`` cells for the cell at ``place`` when they are resized to ``size`` cells, [..., count].

    Bilinear with antialiasing, as in ``torch.nn.functional.interpolate``: a triangle around the place, as wide as a cell of the
    smaller size.
    """
    scale = count / size.float()
    cells = torch.arange(count, device=place.device) + 0.5
    distance = (cells - ((place + 0.5) * scale)[..., None]).abs() / scale.clamp(min=1)[..., None]
    weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def _resized(table: Tensor, row: Tensor, column: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """A table [rows, columns, channels] resized to height and width, at some rows and columns, [..., channels]."""
    rows, columns, _ = table.shape
    weights = _weights(row, height, rows)[..., None] * _weights(column, width, columns)[..., None, :]
    return (weights.flatten(-2) @ table.float().flatten(0, 1)).to(table.dtype)


def padded_positions(positional_embeddings: Tensor, spatial_shapes: Tensor, max_length: Any) -> Tensor:
    """The position of each patch, [images, max_length, channels]; behind an image's patches, the first position."""
    counts = spatial_shapes.prod(-1)
    images = torch.arange(spatial_shapes.shape[0], device=counts.device)
    fits = (counts <= max_length) & (spatial_shapes > 0).all(-1)
    height, width = spatial_shapes[images.where(fits, images.shape[0])].unsqueeze(1).unbind(-1)
    place = torch.arange(max_length, device=counts.device)
    place = place.where(place < counts[:, None], 0)
    return _resized(positional_embeddings, place // width, place % width, height, width)


def packed_positions(positional_embeddings: Tensor, grid_thw: Tensor, spatial_merge_size: int) -> Tensor:
    """The position of each patch of images in one row, [patches, channels], by squares of ``spatial_merge_size``."""
    row, column = get_vision_position_ids(grid_thw, spatial_merge_size).unbind(-1)
    _, sizes, _ = images_of(grid_thw, number_of_patches(), 1)
    return _resized(positional_embeddings, row, column, sizes[:, 1], sizes[:, 2])


def features(
    self: Any, pixel_values: Tensor, spatial_shapes: Tensor, pixel_attention_mask: Tensor, **kwargs: Any
) -> Any:
    """As transformers' own, with the tokens of all images together, one for each square of the projector's factor."""
    kwargs["return_dict"] = True
    outputs = self.vision_tower(
        pixel_values=pixel_values, spatial_shapes=spatial_shapes, pixel_attention_mask=pixel_attention_mask, **kwargs
    )
    states, factor = outputs.last_hidden_state, self.multi_modal_projector.factor
    counts = spatial_shapes.prod(-1)
    patches = states[torch.arange(states.shape[1], device=counts.device) < counts[:, None]]
    places = in_whole_windows(spatial_shapes, patches.shape[0], (factor, factor))
    places = places.where((counts == pixel_attention_mask.sum(1)).all(), patches.shape[0])
    squares = patches[places].unflatten(1, (factor, factor))
    outputs.pooler_output = States((self.multi_modal_projector(squares).flatten(0, 2),))
    return outputs
