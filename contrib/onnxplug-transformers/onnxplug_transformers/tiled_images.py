"""Images and the tiles that they are cut into, whose sizes are an input, while a model is captured.

For LLaVA-NeXT, LLaVA-OneVision and Granite 4 Vision, transformers asks for the size of each image, chooses its grid of
tiles, puts the tiles' features together, cuts off features that the image does not fill, makes a large image smaller
(LLaVA-OneVision), and sets a mark behind each row. Here the place of each token's feature is computed from its number.
Sizes and numbers of tiles that transformers refuses are an index out of range in the exported model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import select_hidden_states

from onnxplug_transformers.exchanged import exchanged
from onnxplug_transformers.packed_images import States

#: Larger heights and widths are refused: to them transformers' own rounding, which integers stand for here, may add one.
_LIMIT = 10_000_000


@contextlib.contextmanager
def tiled_images_of_any_size() -> Iterator[None]:
    """Holds while a model is captured."""
    method = "get_image_features"
    with exchanged(
        {
            f"LlavaNextModel.{method}": (features, _is_other),
            f"LlavaNextVideoModel.{method}": (features, _is_other),
            f"LlavaOnevisionModel.{method}": (features_of_few_tiles, _is_counted_otherwise),
            f"Granite4VisionModel.{method}": (features_of_layers, _is_other),
        }
    ):
        yield


def _is_other(self: Any, pixel_values: Any, image_sizes: Any, *_: Any, **__: Any) -> bool:
    """Whether a call is left to transformers: sizes are no integer tensor, or configured grids aren't of tiles."""
    side = self.config.vision_config.image_size
    are_tensors = isinstance(pixel_values, Tensor) and isinstance(image_sizes, Tensor)
    return (
        not are_tensors
        or image_sizes.is_floating_point()
        or pixel_values.dim() not in (4, 5)
        or not isinstance(side, int)
        or any(size <= 0 or size % side for pair in self.config.image_grid_pinpoints for size in pair)
    )


def _is_counted_otherwise(
    self: Any,
    pixel_values: Any,
    image_sizes: Any,
    vision_feature_layer: Any = None,
    vision_feature_select_strategy: Any = None,
    vision_aspect_ratio: str | None = None,
    batch_num_images: Any = None,
    **_: Any,
) -> bool:
    are_numbers = batch_num_images is None or (
        isinstance(batch_num_images, Tensor) and not batch_num_images.is_floating_point()
    )
    kind = vision_aspect_ratio or self.config.vision_aspect_ratio
    return _is_other(self, pixel_values, image_sizes) or not are_numbers or not re.fullmatch(r"anyres_max_\d+", kind)


def best_grids(image_sizes: Tensor, resolutions: Sequence[Sequence[int]], side: int) -> Tensor:
    """The rows and columns of tiles of the resolution that shows most of an image and wastes least, [images, 2].

    Args:
        image_sizes: Heights and widths of 1 or more, [images, 2].
        resolutions: Heights and widths; the first of the best is taken.
        side: The height and width of a tile.
    """
    table = torch.tensor([list(pair) for pair in resolutions], device=image_sizes.device)
    sizes = image_sizes.double()[:, None]
    scale = (table.double() / sizes).amin(-1, keepdim=True)
    fitted = (sizes * scale).long().prod(-1)
    shown = torch.minimum(fitted, image_sizes.prod(-1)[:, None])
    areas = [height * width for height, width in resolutions]
    most, count = max(areas) + 1, len(areas)
    wasted = torch.tensor(areas, device=image_sizes.device) - shown
    order = torch.arange(count, device=image_sizes.device)
    best = ((shown * most - wasted) * count - order).argmax(-1)
    return table[best] // side


def _padding(image_sizes: Tensor, filled: Tensor) -> Tensor:
    """The numbers of rows and columns at each end that an image does not fill, [images, 2].

    Args:
        image_sizes: Heights and widths, [images, 2].
        filled: Rows and columns of the features of its tiles, [images, 2].
    """
    height, width = image_sizes.unbind(-1)
    rows, columns = filled.unbind(-1)
    is_wide = width.double() / height.double() > columns.double() / rows.double()
    above = (rows - height * columns // width) // 2
    beside = (columns - width * rows // height) // 2
    return torch.stack([above.where(is_wide, 0), beside.where(~is_wide, 0)], -1)


def _fewer(shown: Tensor, most: int) -> Tensor:
    """The rows and columns of images, [images, 2], resized where they have more than 1.21 times ``most`` features.

    The steps are those of Python's ``//`` of floats: a quotient that is rounded up to an integer would be another size. ONNX
    Runtime rounds each step as Python does; torch's own square root of float64 may differ in the last bit.

    Args:
        shown: Rows and columns before, [images, 2].
    """
    ratio = (shown.prod(-1).double() / most).sqrt()[:, None]
    size, divisor = shown.double(), ratio.clamp(min=1)
    return ((size - size.fmod(divisor)) / divisor).round().long().where(ratio > 1.1, shown)


class _Tiles:
    """The tiles of images, and the places of the tokens' features.

    Args:
        is_tiled: Which images are cut into tiles, [images]; the others have the whole image alone. ``None``: all are
            cut.

    Attributes:
        pixels: The pixels of all images' tiles together, [tiles, channels, height, width].
        starts: The number of each image's first tile, [images].
        fits: Whether transformers takes these sizes and tiles, [].
    """

    def __init__(self, config: Any, pixel_values: Tensor, image_sizes: Tensor, is_tiled: Tensor | None = None) -> None:
        side = config.vision_config.image_size
        self.sizes = image_sizes.long().clamp(1, _LIMIT)
        self.grids = best_grids(self.sizes, config.image_grid_pinpoints, side)
        self.is_tiled = is_tiled
        counts = self.grids.prod(-1) + 1
        if is_tiled is not None:
            counts = counts.where(is_tiled, 1)
        self.starts = counts.cumsum(0) - counts
        self.fits = (self.sizes == image_sizes).all()
        if pixel_values.dim() == 5:
            tiles = torch.arange(pixel_values.shape[1], device=counts.device)
            self.fits = self.fits & (counts <= pixel_values.shape[1]).all()
            self.pixels = pixel_values[tiles < counts[:, None]]
            torch._check(self.pixels.shape[0] >= 1)
        else:
            self.fits = self.fits & (counts.sum() == pixel_values.shape[0])
            self.pixels = pixel_values

    def packed(self, features: Tensor, side: int, newline: Tensor, most: int | None = None) -> States:
        """The tokens of all images, [tokens, width].

        Args:
            features: The features of each tile, [tiles, side * side, width].
            side: Rows and columns of a tile's features.
            newline: The mark behind a row, [width].
            most: The number of features to which an image is resized that has more than 1.21 times as many.
        """
        if features.shape[1] != side * side:
            raise ValueError(f"a tile has {features.shape[1]} features, and not {side} rows and columns of them")
        padding = _padding(self.sizes, self.grids * side)
        shown = self.grids * side - 2 * padding
        made, fits = shown, self.fits
        if most is not None:
            made = _fewer(shown, most)
            fits = fits & ((made >= 1) | (made == shown)).all()
        if self.is_tiled is not None:  # a row of nothing but the mark
            made = made.where(self.is_tiled[:, None], torch.tensor([1, 0], device=made.device))
        lengths = side * side + made[:, 0] * (made[:, 1] + 1)
        ends = lengths.cumsum(0)
        count = lengths.sum().item()
        torch._check(count >= 1)
        tokens = torch.arange(count, device=ends.device)
        image = (tokens[:, None] >= ends).sum(-1)
        number = tokens - (ends - lengths)[image]
        in_tiles = number - side * side
        columns = made[image, 1]
        row, column = in_tiles // (columns + 1), in_tiles % (columns + 1)
        is_newline = (in_tiles >= 0) & (column == columns)
        table = torch.cat([features.flatten(0, 1), newline[None].to(features)])
        last = table.shape[0] - 1

        def at(row: Tensor, column: Tensor) -> Tensor:
            row, column = row + padding[image, 0], column + padding[image, 1]
            tile = 1 + row // side * self.grids[image, 1] + column // side
            place = (tile * side + row % side) * side + column % side
            place = self.starts[image] * side * side + place.where(in_tiles >= 0, number)
            return table[place.where(~is_newline, last).where(fits, last + 1)]

        if most is None:
            return States((at(row, column),))
        kind = torch.promote_types(features.dtype, torch.float32)
        is_resized = (in_tiles >= 0) & ~is_newline
        (above, below, down), (left, right, across) = (
            _between(place, shown[image, axis], made[image, axis], is_resized, kind)
            for axis, place in enumerate((row, column))
        )
        upper, lower = (at(y, left) * (1 - across) + at(y, right) * across for y in (above, below))
        return States(((upper * (1 - down) + lower * down).to(features.dtype),))


def _between(
    place: Tensor, length: Tensor, made: Tensor, is_resized: Tensor, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The two of ``length`` places that bilinear interpolation to ``made`` places reads, and the second's weight.

    Args:
        place: A place of ``made`` places, [tokens].
        is_resized: Whether the token is resized, [tokens]; otherwise both are the place itself.
        kind: The dtype in which the weight is computed.

    Returns:
        [tokens], [tokens] and [tokens, 1].
    """
    source = ((place + 0.5).to(kind) * (length.to(kind) / made.clamp(min=1).to(kind)) - 0.5).clamp(min=0)
    first = torch.minimum(source.long(), length - 1).where(is_resized, place)
    second = torch.minimum(first + 1, length - 1).where(is_resized, place)
    return first, second, (source - first).where(is_resized, 0)[:, None]


def _chosen(states: Tensor, strategy: Any) -> Tensor:
    return states[:, 1:] if strategy == "default" else states


@merge_with_config_defaults
@can_return_tuple
@select_hidden_states("vision_feature_layer")
def features(
    self: Any,
    pixel_values: Tensor,
    image_sizes: Tensor,
    vision_feature_layer: Any = None,
    vision_feature_select_strategy: str | None = None,
    **kwargs: Any,
) -> Any:
    """As transformers' own; the tokens of all images together."""
    tiles = _Tiles(self.config, pixel_values, image_sizes)
    outputs = self.vision_tower(tiles.pixels, **{**kwargs, "return_dict": True})
    layers = [vision_feature_layer] if isinstance(vision_feature_layer, int) else vision_feature_layer
    states = torch.cat([_chosen(outputs.hidden_states[layer], vision_feature_select_strategy) for layer in layers], -1)
    side = self.config.vision_config.image_size // self.config.vision_config.patch_size
    outputs.pooler_output = tiles.packed(self.multi_modal_projector(states), side, self.image_newline)
    return outputs


@merge_with_config_defaults
@can_return_tuple
@select_hidden_states("vision_feature_layer")
def features_of_few_tiles(
    self: Any,
    pixel_values: Tensor,
    image_sizes: Tensor,
    vision_feature_layer: Any = None,
    vision_feature_select_strategy: str | None = None,
    vision_aspect_ratio: str | None = None,
    batch_num_images: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """LLaVA-OneVision's tokens of all images together. An image is cut into tiles where it is its text's only image."""
    is_tiled = None
    if batch_num_images is not None:
        ends = batch_num_images.to(image_sizes.device).cumsum(0)
        of_text = (torch.arange(image_sizes.shape[0], device=ends.device)[:, None] >= ends).sum(-1)
        is_tiled = batch_num_images.to(ends.device)[of_text] == 1
    tiles = _Tiles(self.config, pixel_values, image_sizes, is_tiled)
    outputs = self.vision_tower(tiles.pixels, **{**kwargs, "return_dict": True})
    layers = [vision_feature_layer] if isinstance(vision_feature_layer, int) else vision_feature_layer
    states = torch.cat([outputs.hidden_states[layer] for layer in layers], -1)
    made = self.multi_modal_projector(_chosen(states, vision_feature_select_strategy))
    tile = self.config.vision_config.image_size
    side = tile // self.config.vision_config.patch_size
    count = int(str(vision_aspect_ratio).rpartition("_")[2])
    largest = max(height * width for height, width in self.config.image_grid_pinpoints) // tile**2
    most = count * side**2 if largest > 1.2 * count else None
    outputs.pooler_output = tiles.packed(made, side, self.image_newline, most)
    return outputs


def _layers(self: Any) -> list[int]:
    return [*(layer for layer, _ in self.config.deepstack_layer_map), self.config.spatial_vision_layer]


@merge_with_config_defaults
@can_return_tuple
@select_hidden_states(_layers)
def features_of_layers(
    self: Any,
    pixel_values: Tensor,
    image_sizes: Tensor,
    vision_feature_layer: Any = None,
    vision_feature_select_strategy: str | None = None,
    **kwargs: Any,
) -> Any:
    """Granite 4 Vision's tokens of all images, for each layer of the text model that takes features, by its number."""
    from transformers.models.granite4_vision.modeling_granite4_vision import Granite4VisionImageFeaturesOutput

    tiles = _Tiles(self.config, pixel_values, image_sizes)
    outputs = self.vision_tower(tiles.pixels, **kwargs)
    side = self.config.vision_config.image_size // self.config.vision_config.patch_size
    if self.layerwise_projectors is not None:
        side = int(side * Fraction(self.downsample_rate))

    def packed(projector: Callable[[Tensor], Tensor], layer: int) -> States:
        states = _chosen(outputs.hidden_states[layer], vision_feature_select_strategy)
        return tiles.packed(projector(states), side, self.image_newline)

    config = self.config
    deep = zip(self.layerwise_projectors, config.deepstack_layer_map, strict=True)
    results = [(target, packed(projector, layer)) for projector, (layer, target) in deep]
    spatial = zip(self.spatial_projectors, config.spatial_target_layers, strict=False)
    results += [(target, packed(projector, config.spatial_vision_layer)) for projector, target in spatial]
    return Granite4VisionImageFeaturesOutput(deepstack_features=results, hidden_states=outputs.hidden_states)
