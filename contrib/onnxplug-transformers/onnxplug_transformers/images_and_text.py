"""Models that read images and text, in three files as their clients call them: images, embeddings, and the decoder's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from onnxplug import UsageError
from onnxplug_transformers.caches import argument_of, emptied, names, shapes
from onnxplug_transformers.decoders import check_cache, check_one_shape, refuse_changing_angles
from onnxplug_transformers.encoder_decoders import PartExample
from onnxplug_transformers.models import BETWEEN_IMAGES, KINDS_WITH_IMAGES, PACKED, TILED
from onnxplug_transformers.tasks import Part
from onnxplug_transformers.windows import windows_by_position


class Images(Part):
    """Images as the decoder reads them."""

    def forward(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """[images * tokens, width] of [images, channels, height, width]."""
        states = self._model.get_image_features(pixel_values, return_dict=True).pooler_output
        return {"image_features": states.flatten(0, 1)}


class MarkedImages(Images):
    """Images with one more number, 1, by which :class:`StepBetweenMarks` tells them from tokens."""

    def forward(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """[images * tokens, width + 1] of [images, channels, height, width]."""
        return {"image_features": nn.functional.pad(super().forward(pixel_values)["image_features"], (0, 1), value=1.0)}


class Tiles(Part):
    """Tiles of images as the decoder reads them."""

    def forward(self, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor) -> dict[str, Any]:
        """The states of the tiles that are no padding: as in transformers, tiles of zeros alone are left out.

        Args:
            pixel_values: [batch, tiles, channels, height, width].
            pixel_attention_mask: [batch, tiles, height, width], booleans or numbers, 0 for padding.

        Returns:
            ``image_features``, [tiles * tokens, width].
        """
        model, size = self._model.model, self._model.config.vision_config.patch_size
        pixels, mask = pixel_values.flatten(0, 1), pixel_attention_mask.flatten(0, 1)
        is_image = (pixels != 0).flatten(1).any(-1)
        pixels, mask = pixels[is_image], mask[is_image]
        patches = mask.unflatten(1, (-1, size)).unflatten(3, (-1, size)).any(4).any(2)
        states = model.vision_model(pixel_values=pixels, patch_attention_mask=patches).last_hidden_state
        return {"image_features": model.connector(states).flatten(0, 1)}


class PackedImages(Part):
    """Images of any size as the decoder reads them."""

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> dict[str, Any]:
        """Images as one row of patches.

        Args:
            pixel_values: [patches, numbers of a patch].
            image_grid_thw: [images, 3], frames, and rows and columns of patches.

        Returns:
            ``image_features``, [tokens of images, width].
        """
        return {"image_features": self._model.model.visual(pixel_values, grid_thw=image_grid_thw).pooler_output}


class Tokens(Part):
    """Tokens alone."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """[batch, sequence, width] of [batch, sequence]; in the places of images, the numbers have no meaning."""
        config = self._model.config
        if config.image_token_id >= config.get_text_config().vocab_size:
            input_ids = input_ids.masked_fill(input_ids == config.image_token_id, 0)
        return {"inputs_embeds": self._model.get_input_embeddings()(input_ids)}


class MarkedTokens(Tokens):
    """Tokens with one more number, 0."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """[batch, sequence, width + 1] of [batch, sequence]."""
        return {"inputs_embeds": nn.functional.pad(super().forward(input_ids)["inputs_embeds"], (0, 1))}


class Embeddings(Tokens):
    """Tokens, with the features of images in the places of their tokens."""

    def forward(self, input_ids: torch.Tensor, image_features: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        """[batch, sequence, width].

        Args:
            input_ids: [batch, sequence], tokens of images among them.
            image_features: [tokens of images, width], in their order; none in later steps.
        """
        is_image = input_ids == self._model.config.image_token_id
        embedded = super().forward(input_ids)["inputs_embeds"]
        count = image_features.shape[0]
        rows = torch.cat([image_features, image_features.new_zeros(1, image_features.shape[1])])
        place = torch.where(is_image.flatten(), is_image.flatten().cumsum(0) - 1, count).clamp(max=count)
        images = rows[place].unflatten(0, input_ids.shape).to(embedded.dtype)
        # an image's token that was generated is a token like others
        is_given = (place < count).unflatten(0, input_ids.shape)
        return {"inputs_embeds": torch.where(is_given.unsqueeze(-1), images, embedded)}


class Step(Part):
    """A step of the decoder."""

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: Any,
        position_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """One step.

        Args:
            inputs_embeds: [batch, sequence, width].
            attention_mask: [batch, past + sequence], 0 for padding.
            past_key_values: A ``DynamicCache`` without windows.
            position_ids: [3, batch, sequence], where tokens have three positions; ``None``: a position counts the
                tokens that the mask shows.

        Returns:
            ``logits``, [batch, sequence, vocabulary], and ``past_key_values``, the new cache.
        """
        if position_ids is None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            position_ids = position_ids[:, attention_mask.shape[1] - inputs_embeds.shape[1] :]
        model = self._model.model
        decoder = model.text_model if hasattr(model, "text_model") else model.language_model
        cache = argument_of(decoder)
        with windows_by_position(attention_mask):
            result = decoder(
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
                **{cache: past_key_values},
            )
        return {"logits": self._model.lm_head(result.last_hidden_state), "past_key_values": result[cache]}


class StepBetweenImages(Part):
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
        is_image = input_ids == self._model.config.image_token_id
        return self._between(is_image, inputs_embeds, attention_mask, past_key_values)

    def _between(
        self, is_image: torch.Tensor, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, past_key_values: Any
    ) -> dict[str, Any]:
        config = self._model.config
        sequence, total = is_image.shape[1], attention_mask.shape[1]
        past = total - sequence
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        starts = is_image & ~nn.functional.pad(is_image, (1, 0))[:, :-1]
        number = torch.where(is_image, starts.cumsum(-1), 0)  # the number of the image, from 1
        seen = nn.functional.pad(number, (past, 0))
        places = torch.arange(total, device=is_image.device)
        of_queries = places[past:]
        before = places <= of_queries[:, None]
        together = (number[:, :, None] == seen[:, None]) & (number[:, :, None] > 0)
        near = positions[:, past:, None] - positions[:, None] < config.get_text_config().sliding_window
        shown = attention_mask[:, None].bool()
        own = places == of_queries[:, None]  # padding sees itself, or its row of the mask would be empty
        masks = {
            "full_attention": ((before | together) & shown) | own,
            "sliding_attention": ((before | together) & near & shown) | own,
        }
        decoder = self._model.model.language_model
        cache = argument_of(decoder)
        result = decoder(
            inputs_embeds=inputs_embeds,
            attention_mask={name: mask[:, None] for name, mask in masks.items()},
            position_ids=positions[:, past:],
            use_cache=True,
            **{cache: past_key_values},
        )
        return {"logits": self._model.lm_head(result.last_hidden_state), "past_key_values": result[cache]}


class StepBetweenMarks(StepBetweenImages):
    """:class:`StepBetweenImages` for a client that gives the decoder no tokens."""

    def forward(  # type: ignore[override]
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, past_key_values: Any
    ) -> dict[str, Any]:
        """One step.

        Args:
            inputs_embeds: [batch, sequence, width + 1], the last number 1 where images are.
            attention_mask, past_key_values: As of :class:`StepBetweenImages`.
        """
        return self._between(inputs_embeds[..., -1] > 0.5, inputs_embeds[..., :-1], attention_mask, past_key_values)


@dataclass(frozen=True)
class PartOfFolder:
    """A file of the folder.

    Attributes:
        model: The module that the file computes.
        example: Example inputs.
        cases: More inputs to compare on.
        is_drawn: Whether inputs drawn at random are compared too.
    """

    model: Part
    example: PartExample
    cases: Sequence[dict[str, Any]]
    is_drawn: bool = True


@dataclass(frozen=True)
class Parts:
    """The files of a folder.

    Attributes:
        images, embeddings, tokens, step: The files; of ``embeddings`` and ``tokens`` a folder has one.
        layers, heads, head_size: The number of layers, the heads and the head size of the cache.
    """

    images: PartOfFolder
    embeddings: PartOfFolder
    tokens: PartOfFolder
    step: PartOfFolder
    layers: int
    heads: int | None
    head_size: int | None


def parts_of(model: Any, *, in_browsers: bool = False) -> Parts:
    """The parts of a model, with example inputs.

    Args:
        model: The model.
        in_browsers: Whether the client is transformers.js: it has booleans for masks of pixels, and no tokens for the decoder.

    Raises:
        UsageError: The model is of another kind, or its cache has more than keys and values of one shape in every
            layer.
    """
    config, generator = model.config, torch.Generator().manual_seed(0)
    kind = config.model_type
    if kind not in KINDS_WITH_IMAGES:
        raise UsageError(f"models of images and text are taken of {', '.join(KINDS_WITH_IMAGES)}, and this is {kind}")
    refuse_changing_angles(model)
    is_marked = in_browsers and kind in BETWEEN_IMAGES
    of_images = _packed(model, generator) if kind in PACKED else _tiled(model, generator, in_browsers=in_browsers)
    with torch.no_grad():
        features = of_images.model(**of_images.example.kwargs)["image_features"]
    features = features[:, :-1] if is_marked else features
    count, vocabulary = features.shape[0], config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2, count + 8), generator=generator)
    ids[ids == config.image_token_id] += 1 if config.image_token_id == 0 else -1
    first = count // 2
    ids[0, 2 : 2 + first] = ids[1, 2 : 2 + count - first] = config.image_token_id
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    embeddings, between = Embeddings(model).eval(), kind in BETWEEN_IMAGES
    step = (StepBetweenMarks if is_marked else StepBetweenImages if between else Step)(model).eval()
    with torch.no_grad():
        embedded = embeddings(ids, features)["inputs_embeds"]
    if is_marked:
        embedded = torch.cat([embedded, (ids == config.image_token_id)[..., None].to(embedded.dtype)], -1)
    whole = {"input_ids": ids} if between and not is_marked else {}
    whole["inputs_embeds"] = embedded
    if kind in PACKED:  # of the frame, the row and the column
        places = torch.arange(ids.shape[1]).expand(2, -1)
        whole["position_ids"] = torch.stack([places, places // 2 + 1, places * 3 % 7])
    past, sequence = count + 5, {0: "batch", 1: "sequence"}
    axes = {"position_ids": {1: "batch", 2: "sequence"}}

    def piece(start: int, end: int, cache: Any) -> dict[str, Any]:
        parts = {
            name: value.narrow(2 if name == "position_ids" else 1, start, end - start).contiguous()
            for name, value in whole.items()
        }
        positions = {"position_ids": parts.pop("position_ids")} if kind in PACKED else {}
        return {**parts, "attention_mask": mask[:, :end].contiguous(), **positions, "past_key_values": cache}

    with torch.no_grad():
        cache = step(**piece(0, past, DynamicCache()))["past_key_values"]
    layers, heads, width, reason = check_cache(cache, type(model).__name__)
    check_one_shape(reason, type(model).__name__, "the loop of images and text")
    later = piece(past, ids.shape[1], cache)
    own = [*list(later)[:-1], *names(cache, "past_key_values")]
    of_step = PartExample(
        later,
        {
            **{name: axes.get(name, sequence) for name in later},
            "attention_mask": {0: "batch", 1: "past + sequence"},
            "past_key_values": shapes(cache, "batch", "past", "source"),
        },
        own,
        ["logits", *[name.replace("past_key_values", "present") for name in own[len(later) - 1 :]]],
    )
    text = {"input_ids": ids[:, -1:].contiguous()}
    of_embeddings = PartExample(
        {"input_ids": ids, "image_features": features},
        {"input_ids": sequence, "image_features": {0: "image_tokens"}},
        ["input_ids", "image_features"],
        ["inputs_embeds"],
    )
    of_tokens = PartExample({"input_ids": ids}, {"input_ids": sequence}, ["input_ids"], ["inputs_embeds"])
    return Parts(
        of_images,
        PartOfFolder(embeddings, of_embeddings, [{**text, "image_features": features[:0]}]),
        PartOfFolder((MarkedTokens if is_marked else Tokens)(model).eval(), of_tokens, [text]),
        PartOfFolder(step, of_step, [piece(0, ids.shape[1], emptied(cache))]),
        layers,
        heads,
        width,
    )


def _tiled(model: Any, generator: torch.Generator, *, in_browsers: bool) -> PartOfFolder:
    """Images of one size; tiles have a mask of pixels, and some are padding."""
    about, output = model.config.vision_config, ["image_features"]
    size = about.image_size
    pixels = torch.randn(2, 3, about.num_channels, size, size, generator=generator).to(model.dtype)
    if model.config.model_type not in TILED:
        whole = PartExample(
            {"pixel_values": pixels[:, 0].contiguous()}, {"pixel_values": {0: "images"}}, ["pixel_values"], output
        )
        return PartOfFolder((MarkedImages if in_browsers else Images)(model).eval(), whole, [])
    mask = torch.ones(2, 3, size, size, dtype=torch.bool if in_browsers else torch.int64)
    mask[0, 1, size // 2 :], mask[1, 0, :, size // 2 :], mask[1, 2] = 0, 0, 0
    pixels = pixels * mask[:, :, None]
    tiles = {0: "batch", 1: "images"}
    example = PartExample(
        {"pixel_values": pixels, "pixel_attention_mask": mask},
        {"pixel_values": tiles, "pixel_attention_mask": tiles},
        ["pixel_values", "pixel_attention_mask"],
        output,
    )
    single = {"pixel_values": pixels[:1, :1].contiguous(), "pixel_attention_mask": mask[:1, :1].contiguous()}
    return PartOfFolder(Tiles(model).eval(), example, [single])


def _packed(model: Any, generator: torch.Generator) -> PartOfFolder:
    """Images of several sizes; inputs drawn at random would not fit one another."""
    about = model.config.vision_config
    merged = about.spatial_merge_size
    channels = getattr(about, "in_channels", None) or about.in_chans
    width = channels * about.temporal_patch_size * about.patch_size**2

    def inputs(*sizes: tuple[int, int, int]) -> dict[str, Any]:
        grid = torch.tensor([(t, h * merged, w * merged) for t, h, w in sizes])
        count = int(grid.prod(-1).sum())
        return {
            "pixel_values": torch.randn(count, width, generator=generator).to(model.dtype),
            "image_grid_thw": grid,
        }

    example = PartExample(
        inputs((1, 5, 6), (1, 2, 3)),
        {"pixel_values": {0: f"{merged**2} * cells"}, "image_grid_thw": {0: "images"}},
        ["pixel_values", "image_grid_thw"],
        ["image_features"],
    )
    cases = [inputs((1, 3, 9)), inputs((1, 1, 2), (2, 4, 4), (1, 7, 2))]
    return PartOfFolder(PackedImages(model).eval(), example, cases, is_drawn=False)
