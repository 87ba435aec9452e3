"""Packed images whose squares of patches become tokens image by image (PaddleOCR-VL, HunYuan-VL), while a model is captured.

transformers loops over the images; HunYuan-VL also resizes its table of positions for each image, and puts marks behind each row
of its tokens and around them. Here the places of patches and marks are computed from the sizes. Sizes that transformers refuse
are an index out of range in the exported model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.output_capturing import capture_outputs

from onnxplug_transformers.exchanged import exchanged, modeling_of
from onnxplug_transformers.packed_images import PACKED, in_whole_windows
from onnxplug_transformers.sized_images import whole_squares


@contextlib.contextmanager
def squares_of_any_number() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged(
        {
            "PaddleOCRProjector.forward": (joined, _are_no_sizes),
            "HunYuanVLVisionPatchEmbed.forward": (embedded, _is_other_table),
            "HunYuanVLVisionTransformer.forward": (states, _is_other_encoder),
        }
    ):
        yield


def _are_no_sizes(self: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call is left to transformers: sizes are no integer tensor."""
    sizes = args[1] if len(args) > 1 else next((kwargs[name] for name in kwargs if name.endswith("grid_thw")), None)
    return not isinstance(sizes, Tensor) or sizes.is_floating_point()


def _is_other_table(self: Any, *args: Any, **kwargs: Any) -> bool:
    return _are_no_sizes(self, *args, **kwargs) or self.config.interpolate_mode not in ("bilinear", "bicubic")


def _is_other_encoder(self: Any, *args: Any, **kwargs: Any) -> bool:
    return _is_other_table(self, *args, **kwargs) or self.config._attn_implementation not in ("eager", "sdpa")


def joined(self: Any, image_features: Tensor, image_grid_thw: Tensor) -> Tensor:
    """PaddleOCR-VL's token of each square of patches, [tokens, width], frame by frame and row by row.

    Args:
        image_features: The states of all images' patches, row by row, [patches, width].
        image_grid_thw: Frames, rows and columns of each image, which squares divide, [images, 3].
    """
    patches, window = image_features.shape[0], self.merge_kernel_size
    grid = image_grid_thw.to(image_features.device)
    # Frames below one another are like one image, as squares divide each frame.
    places = in_whole_windows(torch.stack([grid[:, 0] * grid[:, 1], grid[:, 2]], -1), patches, window)
    fits = (grid[:, 1] % window[0] == 0).all() & (grid.prod(-1).sum() == patches)
    squares = self.pre_norm(image_features)[places.where(fits, patches)]
    result: Tensor = self.linear_2(self.act(self.linear_1(squares.flatten(1))))
    return result


def embedded(self: Any, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
    """HunYuan-VL's patches with their positions, [1, patches, width], from the table resized to each image."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    pixels = pixel_values.unflatten(1, (self.config.num_channels, self.patch_size, self.patch_size))
    patches = self.patch_embedding(pixels.to(dtype=self.patch_embedding.weight.dtype)).flatten(1)
    cells, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, self.position_edge, mode=self.config.interpolate_mode, align_corners=False
    )
    table = self.position_embedding.weight[1:].float()
    positions = (table[cells] * weights[:, :, None]).sum(1)
    return (patches + positions.to(patches.dtype))[None]


@capture_outputs
def states(self: Any, pixel_values: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
    """HunYuan-VL's states of patches, [1, patches, width], and the tokens of all images, [1, tokens, width]."""
    token = PACKED.set((pixel_values.shape[0], {}))
    try:
        hidden_states = self.embeddings(pixel_values, grid_thw)
        bounds, longest = modeling_of(self).get_vision_attention_seqlens(grid_thw, self.config, kwargs=kwargs)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cu_seqlens=bounds, max_seqlen=longest, attention_mask=None, **kwargs)
    finally:
        PACKED.reset(token)
    tokens = marked(self.patch_merger, hidden_states[0], grid_thw)
    return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=tokens[None])


def marked(merger: Any, patches: Tensor, grid_thw: Tensor) -> Tensor:
    """The tokens of all images, [tokens, width]: a mark, each row's tokens and a mark, and a last mark.

    Args:
        merger: The model's part that makes tokens of one image.
        patches: Row by row, [patches, width].
        grid_thw: Frames, of which there is one, rows and columns of each image, [images, 3]. Patches that fill no
            square are left out.
    """
    side, grid = merger.spatial_merge_size, grid_thw.to(patches.device)
    fits = (grid[:, 0] == 1).all() & (grid[:, 1:] > 1).all()
    places = whole_squares(grid[:, 1:], side, patches.shape[0]).where(fits, patches.shape[0])
    normed = merger.before_rms(patches)
    squares = normed[places].transpose(1, 2).unflatten(2, (side, side))
    made = merger.proj_out(merger.proj_act(merger.proj_conv(squares))).flatten(1)
    ends_of_rows = merger.image_newline[None].to(normed.dtype)
    around = torch.stack([merger.image_begin, merger.image_end]).to(normed.dtype)
    table = torch.cat([merger.mlp(torch.cat([made, ends_of_rows])), around])
    rows, columns = (grid[:, 1:] // side).unbind(-1)
    lengths = rows * (columns + 1) + 2
    ends, firsts = lengths.cumsum(0), (rows * columns).cumsum(0) - rows * columns
    count = lengths.clamp(min=0).sum().item()
    number = torch.arange(count, device=ends.device)
    image = (number[:, None] >= ends).sum(-1)
    within = number - (ends - lengths)[image] - 1
    row, column = within // (columns[image] + 1), within % (columns[image] + 1)
    place = (firsts[image] + row * columns[image] + column).where(column < columns[image], places.shape[0])
    place = place.where(within >= 0, places.shape[0] + 1)
    place = place.where(within < lengths[image] - 2, places.shape[0] + 2)
    result: Tensor = merger.after_rms(table[place])
    return result
