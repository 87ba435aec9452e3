"""The models of a pipeline, with optimum's names of inputs and outputs, and with example inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from onnxplug import UsageError

_SAMPLE = {0: "batch", 2: "height", 3: "width"}
_TOKENS = {0: "batch", 1: "sequence"}
_BATCH = {0: "batch"}


@dataclass(frozen=True)
class Part:
    """A model of a pipeline.

    Attributes:
        model: The module that is exported.
        inputs: Example inputs by name, and their dynamic dimensions.
    """

    model: nn.Module
    inputs: Mapping[str, tuple[torch.Tensor, Mapping[int, Any]]]


class TextEncoder(nn.Module):
    """Tokens to the states of the last layer, their pooled vector, and, of CLIP, the states before each layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """[batch, sequence] tokens. A pipeline that asks for one result takes the first, ``text_embeds`` if any."""
        of_clip = self.model.config.model_type.startswith("clip")
        encoded = self.model(input_ids=input_ids, output_hidden_states=of_clip)
        names = ("text_embeds", "last_hidden_state", "pooler_output")
        results = {name: encoded[name] for name in names if name in encoded}
        states = encoded.hidden_states[:-1] if of_clip else ()
        return results | {f"hidden_states.{layer}": state for layer, state in enumerate(states)}


class UNet(nn.Module):
    """A step of diffusion."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep_cond: torch.Tensor | None = None,
        text_embeds: torch.Tensor | None = None,
        time_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """[batch, channels, height, width] of latents, at a step, for texts."""
        added = {"text_embeds": text_embeds, "time_ids": time_ids} if text_embeds is not None else None
        given = {"timestep_cond": timestep_cond, "added_cond_kwargs": added, "return_dict": False}
        return {"out_sample": self.model(sample, timestep, encoder_hidden_states, **given)[0]}


class Transformer(nn.Module):
    """A step of diffusion by a transformer, whose inputs are its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor | None = None,
        txt_ids: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Latents, [batch, channels, height, width] or [batch, patches, channels], at a step, for texts."""
        given = {"img_ids": img_ids, "txt_ids": txt_ids, "guidance": guidance}
        results = self.model(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            pooled_projections=pooled_projections,
            timestep=timestep,
            return_dict=False,
            **{name: value for name, value in given.items() if value is not None},
        )
        return {"out_hidden_states": results[0]}


class VaeEncoder(nn.Module):
    """Images to means and logarithms of variances of latents."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """[batch, 3, height, width]."""
        return {"latent_parameters": self.model.encode(sample).latent_dist.parameters}


class VaeDecoder(nn.Module):
    """Latents to images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent_sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """[batch, channels, height, width]."""
        return {"sample": self.model.decode(latent_sample, return_dict=False)[0]}


def _text_encoder(name: str, model: Any, settings: Mapping[str, Any]) -> dict[str, Part]:
    longest = getattr(model.config, "max_position_embeddings", None)
    count = min(9, longest or 9)
    tokens = torch.randint(0, model.config.vocab_size, (2, count))
    tokens[:, -1] = model.config.vocab_size - 1  # CLIP's last token has the largest number
    return {name: Part(TextEncoder(model), {"input_ids": (tokens, {0: "batch", 1: Dim("sequence", max=longest)})})}


def _unet(name: str, model: Any, settings: Mapping[str, Any]) -> dict[str, Part]:
    config, steps = model.config, 1 << max(0, len(model.config.block_out_channels) - 1)
    known = {
        "addition_embed_type": (None, "text_time"),
        "class_embed_type": (None,),
        "num_class_embeds": (None,),
        "encoder_hid_dim_type": (None, "text_proj"),
    }
    others = [f"{key} {config[key]!r}" for key, values in known.items() if config[key] not in values]
    if others:
        raise UsageError(f"{name} takes conditions of a kind that is not known here ({', '.join(others)})")
    width = config.encoder_hid_dim or config.cross_attention_dim
    inputs = {
        "sample": (torch.randn(2, config.in_channels, steps + 1, 2 * steps), _SAMPLE),
        "timestep": (torch.tensor(601.0), {}),
        "encoder_hidden_states": (torch.randn(2, 7, width if isinstance(width, int) else width[0]), _TOKENS),
    }
    if config.time_cond_proj_dim is not None:
        inputs["timestep_cond"] = (torch.randn(2, config.time_cond_proj_dim), _BATCH)
    if config.addition_embed_type == "text_time":
        # six numbers of sizes and crops; a pipeline that refines has a score in place of the two of the wanted size
        count = 5 if settings.get("requires_aesthetics_score") else 6
        rest = config.projection_class_embeddings_input_dim - count * config.addition_time_embed_dim
        inputs["text_embeds"] = (torch.randn(2, rest), _BATCH)
        inputs["time_ids"] = (torch.randint(1, 64, (2, count)).float(), _BATCH)
    return {name: Part(UNet(model), inputs)}


def _flux(name: str, model: Any, settings: Mapping[str, Any]) -> dict[str, Part]:
    config = model.config
    inputs = {
        "hidden_states": (torch.randn(2, 12, config.in_channels), {0: "batch", 1: "patches"}),
        "encoder_hidden_states": (torch.randn(2, 7, config.joint_attention_dim), _TOKENS),
        "pooled_projections": (torch.randn(2, config.pooled_projection_dim), _BATCH),
        "timestep": (torch.tensor([0.6, 0.2]), _BATCH),
        "img_ids": (torch.randint(0, 4, (12, 3)).float(), {0: "patches"}),
        "txt_ids": (torch.zeros(7, 3), {0: "sequence"}),
    }
    if config.guidance_embeds:
        inputs["guidance"] = (torch.tensor([3.5, 1.0]), _BATCH)
    return {name: Part(Transformer(model), inputs)}


def _stable_diffusion_3(name: str, model: Any, settings: Mapping[str, Any]) -> dict[str, Part]:
    config = model.config
    rows, columns = (Dim(name, max=config.pos_embed_max_size) for name in ("rows", "columns"))
    size = {0: "batch", 2: config.patch_size * rows, 3: config.patch_size * columns}
    inputs = {
        "hidden_states": (torch.randn(2, config.in_channels, 3 * config.patch_size, 4 * config.patch_size), size),
        "encoder_hidden_states": (torch.randn(2, 7, config.joint_attention_dim), _TOKENS),
        "pooled_projections": (torch.randn(2, config.pooled_projection_dim), _BATCH),
        "timestep": (torch.tensor([601.0, 200.0]), _BATCH),
    }
    return {name: Part(Transformer(model), inputs)}


def _vae(name: str, model: Any, settings: Mapping[str, Any]) -> dict[str, Part]:
    config, steps = model.config, 1 << max(0, len(model.config.block_out_channels) - 1)
    images = torch.rand(2, config.in_channels, 2 * steps, 3 * steps) * 2 - 1
    latents = torch.randn(2, config.latent_channels, 3, 2)
    return {
        f"{name}_encoder": Part(VaeEncoder(model), {"sample": (images, _SAMPLE)}),
        f"{name}_decoder": Part(VaeDecoder(model), {"latent_sample": (latents, _SAMPLE)}),
    }


#: Name of a class to the function that makes the parts of such a model, by the names of their folders, with the settings
#: of its pipeline.
KINDS: dict[str, Callable[[str, Any, Mapping[str, Any]], dict[str, Part]]] = {
    "CLIPTextModel": _text_encoder,
    "CLIPTextModelWithProjection": _text_encoder,
    "T5EncoderModel": _text_encoder,
    "UNet2DConditionModel": _unet,
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _stable_diffusion_3,
    "AutoencoderKL": _vae,
}
