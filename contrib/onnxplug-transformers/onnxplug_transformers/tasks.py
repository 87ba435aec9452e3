"""Models with one call: inputs from the model's own signature, its results as outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from onnxplug import UsageError
from onnxplug_transformers.folders import preprocessor_of

#: Samples of sound in an example, and steps of a spectrogram.
_SAMPLES, _FRAMES = 6000, 40


@dataclass
class TaskExample:
    """The arguments of ``to_onnx`` for a model of one call."""

    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)
    dynamic_shapes: dict[str, dict[int, str]] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor, *names: str | None) -> None:
        """Adds an input with the names of its dimensions; ``None`` for a fixed dimension."""
        self.kwargs[name] = value
        self.dynamic_shapes[name] = {axis: size for axis, size in enumerate(names) if size is not None}


class Part(nn.Module):
    """A model under another ``forward``; modules and parameters have the names that they have in the model."""

    _model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        if dict(self.named_parameters()).keys() == dict(model.named_parameters()).keys():
            object.__setattr__(self, "_model", model)  # not a submodule: names begin where the model's do
        else:
            self._model = model


class Task(Part):
    """A model without results for training or for a next call: its results are logits, states or embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._without = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """The results that are not ``None``, by name."""
        result = self._model(**inputs, **self._without, return_dict=True)
        return {name: value for name, value in result.items() if value is not None and not _is_part(value)}


def _is_part(value: Any) -> bool:
    """Whether a result is the result of a model within the model, whose embeddings are another result."""
    return isinstance(value, ModelOutput)


def task_example(model: Any, folder: Path) -> TaskExample:
    """Example inputs of a model, by the parameters of its ``forward`` and the sizes in its configuration.

    Args:
        folder: The folder that may have ``preprocessor_config.json`` or ``processor_config.json``.
    """
    takes = set(inspect.signature(model.forward).parameters)
    processor = preprocessor_of(folder)
    example = TaskExample()
    name = model.main_input_name
    if name not in ("input_ids", "pixel_values", "input_values", "input_features"):
        raise UsageError(f"{type(model).__name__} takes {name}, which is neither text nor images nor sound")
    generator = torch.Generator().manual_seed(0)
    if name == "input_ids":
        _add_text(example, model, takes, generator)
        if "pixel_values" in takes:  # each image is compared with each text
            dynamic = example.dynamic_shapes
            dynamic.update({key: {**shape, 0: "texts"} for key, shape in dynamic.items()})
            _add_images(example, model.config.vision_config, processor, generator, "images", 3)
    elif name == "pixel_values":
        _add_images(example, model.config, processor, generator, "batch", 2)
        if "pixel_mask" in takes:
            mask = torch.ones(2, 64, 64, dtype=torch.long)  # of any size: the model resizes it to the features
            mask[1, :, 48:] = 0
            example.add("pixel_mask", mask, "batch", "mask_height", "mask_width")
    else:
        _add_sound(example, model, name, takes, processor, generator)
    floats = {key: value.to(model.dtype) for key, value in example.kwargs.items() if value.is_floating_point()}
    example.kwargs.update(floats)
    return example


def _add_text(example: TaskExample, model: Any, takes: set[str], generator: torch.Generator) -> None:
    config = model.config.get_text_config()
    ids = torch.randint(0, config.vocab_size, (2, 7), generator=generator)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:  # positions may depend on where padding is; the example has none
        ids[ids == padding] = (padding + 1) % config.vocab_size
    example.add("input_ids", ids, "batch", "sequence")
    if "attention_mask" in takes:
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        example.add("attention_mask", mask, "batch", "sequence")
    kinds = getattr(config, "type_vocab_size", 0) or 0
    if "token_type_ids" in takes and kinds > 1:
        example.add("token_type_ids", torch.arange(7).ge(4).long().repeat(2, 1), "batch", "sequence")


def _add_sound(
    example: TaskExample,
    model: Any,
    name: str,
    takes: set[str],
    processor: Mapping[str, Any],
    generator: torch.Generator,
) -> None:
    config = model.config
    bins = getattr(config, "num_mel_bins", None) or processor.get("feature_size")
    frames = getattr(config, "max_source_positions", None)
    if name == "input_values" and not isinstance(getattr(config, "num_mel_bins", None), int):  # sound itself
        example.add(name, torch.randn(2, _SAMPLES, generator=generator), "batch", "samples")
        if "attention_mask" in takes and processor.get("return_attention_mask"):
            mask = torch.ones(2, _SAMPLES, dtype=torch.long)
            mask[1, _SAMPLES * 3 // 4 :] = 0
            example.add("attention_mask", mask, "batch", "samples")
    elif name == "input_values":  # a spectrogram of a fixed length
        frames = getattr(config, "max_length", None)
        if not isinstance(frames, int) or not isinstance(bins, int):
            raise UsageError(f"{type(config).__name__} does not say how long a spectrogram is")
        example.add(name, torch.randn(2, frames, bins, generator=generator), "batch")
    elif isinstance(bins, int) and frames is not None:  # Whisper's: two frames a position
        example.add(name, torch.randn(2, bins, 2 * frames, generator=generator), "batch")
    else:
        width = getattr(config, "feature_projection_input_dim", None) or getattr(config, "input_feat_per_channel", bins)
        if not isinstance(width, int):
            raise UsageError(f"{type(config).__name__} does not say how wide a spectrogram is")
        example.add(name, torch.randn(2, _FRAMES, width, generator=generator), "batch", "frames")
        if "attention_mask" in takes:
            mask = torch.ones(2, _FRAMES, dtype=torch.long)
            mask[1, _FRAMES * 3 // 4 :] = 0
            example.add("attention_mask", mask, "batch", "frames")


def _add_images(
    example: TaskExample,
    config: Any,
    processor: Mapping[str, Any],
    generator: torch.Generator,
    batch: str,
    count: int,
) -> None:
    channels = getattr(config, "num_channels", 3)
    if _keeps_proportions(processor):
        images = torch.randn(count, channels, 96, 128, generator=generator)
        example.add("pixel_values", images, batch, None, "height", "width")
    else:
        height, width = _image_size(config, processor)
        example.add("pixel_values", torch.randn(count, channels, height, width, generator=generator), batch)


def _keeps_proportions(processor: Mapping[str, Any]) -> bool:
    """Whether images come to the model in sizes of their own: their longest edge is bounded, and nothing is cut off."""
    size = processor.get("size")
    return isinstance(size, Mapping) and "longest_edge" in size and not processor.get("do_center_crop", False)


def _image_size(config: Any, processor: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width: the model's own, or the size to which the processor brings images."""
    for size in (getattr(config, "image_size", None), processor.get("crop_size"), processor.get("size")):
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
        if isinstance(size, Mapping):
            if "height" in size and "width" in size:
                return int(size["height"]), int(size["width"])
            if "shortest_edge" in size:
                return int(size["shortest_edge"]), int(size["shortest_edge"])
    raise UsageError(
        f"neither {type(config).__name__} nor preprocessor_config.json says how large images are",
        hint="Save the image processor beside the model, or set image_size in config.json.",
    )
