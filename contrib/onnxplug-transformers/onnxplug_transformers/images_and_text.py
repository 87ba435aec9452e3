"""Models that read images and text, in three files as onnxruntime-genai calls them: images, embeddings, and the decoder's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from onnxplug import UsageError
from onnxplug_transformers.caches import emptied, names, shapes
from onnxplug_transformers.decoders import check_cache
from onnxplug_transformers.encoder_decoders import PartExample
from onnxplug_transformers.models import KINDS_WITH_IMAGES
from onnxplug_transformers.tasks import Part


class Images(Part):
    """Images as the decoder reads them."""

    def forward(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """[images * tokens, width] of [images, channels, height, width]."""
        states = self._model.get_image_features(pixel_values, return_dict=True).pooler_output
        return {"image_features": states.flatten(0, 1)}


class Embeddings(Part):
    """Tokens, and what images gave in the places of their tokens."""

    def forward(self, input_ids: torch.Tensor, image_features: torch.Tensor) -> dict[str, Any]:
        """[batch, sequence, width].

        Args:
            input_ids: [batch, sequence], tokens of images among them.
            image_features: [tokens of images, width], in their order; none in later steps.
        """
        config = self._model.config
        is_image = input_ids == config.image_token_id
        known = (
            input_ids
            if config.image_token_id < config.get_text_config().vocab_size
            else input_ids.masked_fill(is_image, 0)
        )
        embedded = self._model.get_input_embeddings()(known)
        count = image_features.shape[0]
        rows = torch.cat([image_features, image_features.new_zeros(1, image_features.shape[1])])
        place = torch.where(is_image.flatten(), is_image.flatten().cumsum(0) - 1, count).clamp(max=count)
        images = rows[place].unflatten(0, input_ids.shape)
        return {"inputs_embeds": torch.where(is_image.unsqueeze(-1), images.to(embedded.dtype), embedded)}


class Step(Part):
    """A step of the decoder, which sees the whole of an image from each of its tokens."""

    def forward(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, past_key_values: Any
    ) -> dict[str, Any]:
        """One step.

        Args:
            input_ids: [batch, sequence], which say where images are.
            inputs_embeds: [batch, sequence, width].
            attention_mask: [batch, past + sequence], 0 for padding.
            past_key_values: A ``DynamicCache`` without windows.

        Returns:
            ``logits``, [batch, sequence, vocabulary], and ``past_key_values``, the new cache.
        """
        config = self._model.config
        sequence, total = input_ids.shape[1], attention_mask.shape[1]
        past = total - sequence
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        is_image = input_ids == config.image_token_id
        starts = is_image & ~nn.functional.pad(is_image, (1, 0))[:, :-1]
        number = torch.where(is_image, starts.cumsum(-1), 0)  # of the image, from 1
        seen = nn.functional.pad(number, (past, 0))
        places = torch.arange(total, device=input_ids.device)
        of_queries = places[past:]
        before = places <= of_queries[:, None]
        together = (number[:, :, None] == seen[:, None]) & (number[:, :, None] > 0)
        near = positions[:, past:, None] - positions[:, None] < config.get_text_config().sliding_window
        shown = attention_mask[:, None].bool()
        own = places == of_queries[:, None]  # padding sees itself, or its row would be none
        masks = {
            "full_attention": ((before | together) & shown) | own,
            "sliding_attention": (((before & near) | together) & shown) | own,
        }
        result = self._model.model.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask={name: mask[:, None] for name, mask in masks.items()},
            position_ids=positions[:, past:],
            past_key_values=past_key_values,
            use_cache=True,
        )
        return {"logits": self._model.lm_head(result.last_hidden_state), "past_key_values": result.past_key_values}


@dataclass(frozen=True)
class Examples:
    """Example inputs of the three parts.

    Attributes:
        first: Of a first step, a prompt with an image.
    """

    images: PartExample
    embeddings: PartExample
    step: PartExample
    first: dict[str, Any]
    layers: int
    heads: int
    head_size: int


def examples_of(model: Any) -> Examples:
    """Example inputs."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if config.model_type not in KINDS_WITH_IMAGES:
        raise UsageError(
            f"models of images and text are taken of {', '.join(KINDS_WITH_IMAGES)}, and this is {config.model_type}"
        )
    size = config.vision_config.image_size
    pixels = torch.randn(2, config.vision_config.num_channels, size, size, generator=generator).to(model.dtype)
    with torch.no_grad():
        features = Images(model)(pixels)["image_features"]
    count, vocabulary = features.shape[0] // 2, config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2, count + 8), generator=generator)
    ids[ids == config.image_token_id] += 1 if config.image_token_id == 0 else -1
    ids[:, 2 : 2 + count] = config.image_token_id
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with torch.no_grad():
        embedded = Embeddings(model)(ids, features)["inputs_embeds"]
        step, past = Step(model), count + 5
        cache = step(ids[:, :past], embedded[:, :past], mask[:, :past], DynamicCache())["past_key_values"]
    layers, heads, head_size = check_cache(cache, type(model).__name__)
    later = {
        "input_ids": ids[:, past:].contiguous(),
        "inputs_embeds": embedded[:, past:].contiguous(),
        "attention_mask": mask,
        "past_key_values": cache,
    }
    first = {"input_ids": ids, "inputs_embeds": embedded, "attention_mask": mask, "past_key_values": emptied(cache)}
    sequence = {0: "batch", 1: "sequence"}
    given = [*list(later)[:-1], *names(cache, "past_key_values")]
    return Examples(
        PartExample({"pixel_values": pixels}, {"pixel_values": {0: "images"}}, ["pixel_values"], ["image_features"]),
        PartExample(
            {"input_ids": ids, "image_features": features},
            {"input_ids": sequence, "image_features": {0: "image_tokens"}},
            ["input_ids", "image_features"],
            ["inputs_embeds"],
        ),
        PartExample(
            later,
            {
                "input_ids": sequence,
                "inputs_embeds": sequence,
                "attention_mask": {0: "batch", 1: "past + sequence"},
                "past_key_values": shapes(cache, "batch", "past", "source"),
            },
            given,
            ["logits", *[name.replace("past_key_values", "present") for name in given[3:]]],
        ),
        first,
        layers,
        heads,
        head_size,
    )
