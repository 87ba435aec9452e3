"""Images padded to one size whose codes become words of the text (Emu3), while a model is captured.

transformers cuts each image's codes out in a loop over the images. Here the code of each word is found by the word's number. Sizes
that transformers refuses are an index out of range in the exported model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import can_return_tuple

from onnxplug_transformers.exchanged import exchanged, modeling_of
from onnxplug_transformers.packed_images import States


@contextlib.contextmanager
def codes_of_any_number_of_images() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged(
        {
            "Emu3Model.get_image_tokens": (words, _is_other),
            "Emu3Model.get_image_features": (features, _is_other),
        }
    ):
        yield


def _is_other(self: Any, pixel_values: Any, image_sizes: Any, **kwargs: Any) -> bool:
    """Whether a call is left to transformers: videos, sizes that are no integer tensor, or further results."""
    are_tensors = isinstance(pixel_values, Tensor) and isinstance(image_sizes, Tensor)
    config = self.vqmodel.config
    frames = config.temporal_downsample_factor  # a power of two of frames becomes one frame
    return (
        not are_tensors
        or pixel_values.dim() != 4
        or image_sizes.is_floating_point()
        or frames & (frames - 1) != 0
        or bool(config.output_hidden_states or config.output_attentions)
        or not kwargs.keys() <= {"return_dict"}
    )


def _encoded(model: Any, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's states, and the codes of all images with their padding, [images, rows, columns]."""
    frames = model.config.temporal_downsample_factor
    states = model.encoder(pixel_values[:, None].repeat(1, frames, 1, 1, 1).to(model.dtype))
    return states, model.quantize(model.quant_conv(states.transpose(1, 2)).transpose(1, 2)).squeeze(1)


def words(self: Any, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
    """The words of all images, [words]."""
    return _words(self, _encoded(self.vqmodel, pixel_values)[1], image_sizes)


def _words(model: Any, codes: Tensor, image_sizes: Tensor) -> Tensor:
    """The words of the codes that lie in each image, and an end of line behind each row, [words].

    Args:
        model: The model of images and text.
        codes: [images, rows, columns].
        image_sizes: Heights and widths, [images, 2].
    """
    images, rows, columns = codes.shape
    factor = model.vqmodel.vision_spatial_factor
    sizes = image_sizes.to(codes.device).long()
    shown = sizes // factor
    fits = (sizes >= 0).all() & (shown[:, 0] <= rows).all() & (shown[:, 1] <= columns).all()
    fits = fits & (torch.ones_like(shown[:, 0]).sum() == images)
    lengths = shown[:, 0] * (shown[:, 1] + 1)
    ends = lengths.cumsum(0)
    number = torch.arange(lengths.clamp(min=0).sum().item(), device=codes.device)
    image = (number[:, None] >= ends).sum(-1)
    within, width = number - (ends - lengths)[image], shown[image, 1]
    row, column = within // (width + 1), within % (width + 1)
    is_last = column == width
    found = codes[image.where(fits, images), row, column.where(~is_last, 0)]
    known = model.vocabulary_mapping
    table = torch.tensor(
        [known.img2bpe.get(code, 0) for code in range(max(known.img2bpe) + 1)], dtype=torch.int, device=codes.device
    )
    return table[found].where(~is_last, known.eol_token_id)


@can_return_tuple
def features(self: Any, pixel_values: Tensor, image_sizes: Tensor, **kwargs: Any) -> Any:
    """The embeddings of the words of all images, [words, width]."""
    states, codes = _encoded(self.vqmodel, pixel_values)
    return modeling_of(self).Emu3VQVAEModelOutput(
        last_hidden_state=states,
        image_tokens=States(),  # the codes of each image, which can't be joined
        pooler_output=States((self.get_input_embeddings()(_words(self, codes, image_sizes)),)),
    )
