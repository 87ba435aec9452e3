"""Inputs of the architectures of transformers: those of their kind, and the few that need others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.models.configurations import VOCABULARY

#: Inputs by name, and the dynamic dimensions of each by axis.
Inputs = tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]


def draw_inputs(config: Any, model_type: str, kind: str) -> Inputs:
    """Example inputs for a model.

    Args:
        config: Its configuration.
        model_type: Its name in transformers.
        kind: ``causal``, ``masked``, ``seq2seq`` or ``image``.
    """
    return OWN_INPUTS.get(
        f"{kind} {model_type}", _image if kind == "image" else _text_pair if kind == "seq2seq" else _text
    )(config)


def _ids(*sizes: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, sizes)


def _text(config: Any) -> Inputs:
    return {"input_ids": _ids(2, 9)}, {"input_ids": {0: "batch", 1: "sequence"}}


def _text_pair(config: Any) -> Inputs:
    ids, axes = _text(config)
    return {**ids, "decoder_input_ids": _ids(2, 7)}, {**axes, "decoder_input_ids": {0: "batch", 1: "target"}}


def _text_pair_and_mask(config: Any) -> Inputs:
    """These make a mask themselves, but not while torch.export traces them."""
    inputs, axes = _text_pair(config)
    mask = (torch.arange(9)[None] < torch.tensor([[9], [6]])).long()
    return {**inputs, "attention_mask": mask}, {**axes, "attention_mask": {0: "batch", 1: "sequence"}}


def _image(config: Any) -> Inputs:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), height, width)}, {
        "pixel_values": {0: "batch"}
    }


def _codebooks(config: Any) -> Inputs:
    """A row for each codebook: the batch is a multiple of their number."""
    return {"input_ids": _ids(2 * config.num_codebooks, 9)}, {"input_ids": {1: "sequence"}}


def _patches(config: Any) -> Inputs:
    """Images as rows of patches; the second one is smaller than the first."""
    vision = config.vision_config
    inputs = {
        "pixel_values": torch.randn(2, 16, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": (torch.arange(16)[None] < torch.tensor([[16], [12]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }
    return inputs, {name: {0: "batch"} for name in inputs}


def _image_and_text(config: Any) -> Inputs:
    """An image's tokens before those of the text."""
    image = torch.full((2, config.mm_tokens_per_image), config.image_token_index)
    size = config.vision_config.image_size
    inputs = {
        "input_ids": torch.cat([image, torch.randint(4, VOCABULARY - 2, (2, 5))], 1),
        "pixel_values": torch.randn(2, 3, size, size),
    }
    return inputs, {"input_ids": {0: "batch", 1: "sequence"}, "pixel_values": {0: "batch"}}


def _sound_and_text(config: Any) -> Inputs:
    """Eight frames for each token; sound and text are added."""
    inputs = {"input_ids": _ids(2, 9), "input_features": torch.randn(2, config.audio_config.num_mel_bins, 72)}
    return inputs, {name: {0: "batch"} for name in inputs}


OWN_INPUTS: Mapping[str, Callable[[Any], Inputs]] = {
    "causal musicgen": _codebooks,
    "causal musicgen_melody": _codebooks,
    "seq2seq longt5": _text_pair_and_mask,
    "seq2seq switch_transformers": _text_pair_and_mask,
    "seq2seq voxtral_realtime": _sound_and_text,
    "image imagegpt": _text,  # clusters of colours
    "image siglip2": _patches,
    "image shieldgemma2": _image_and_text,
}
