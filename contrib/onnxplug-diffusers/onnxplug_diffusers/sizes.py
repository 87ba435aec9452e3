"""Decisions on sizes in the Python code of diffusers' modules, replaced so that one graph serves all sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from onnxplug.capture.patching import patched
from onnxplug.torch_private import FakeTensor
from onnxplug_diffusers.batches import hidream as images_of_any_number


class _Factor:
    """Stands for the number of a UNet's upsamplers: no size is a multiple of two to its power.

    A UNet passes its upsamplers the sizes to restore only where a size is no such multiple. These are right for every
    size.
    """

    def __rpow__(self, base: int) -> _Factor:
        return self

    def __rmod__(self, size: Any) -> int:
        return 1


def _upsample(self: Any, hidden_states: Tensor, output_size: Any = None, *_: Any, **__: Any) -> Tensor:
    """``Upsample2D.forward`` without copies that depend on the number of elements and change no result."""
    x = hidden_states
    if self.norm is not None:
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    if self.use_conv_transpose:
        return self.conv(x)
    if self.interpolate:
        sizes = {"scale_factor": 2.0} if output_size is None else {"size": output_size}
        x = nn.functional.interpolate(x, mode="nearest", **sizes)
    if not self.use_conv:
        return x
    return (self.conv if self.name == "conv" else self.Conv2d_0)(x)


def _causal_mask(n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: int | None = None) -> Tensor:
    """``prepare_causal_attention_mask``, which loops over all positions: each sees its frame and earlier frames."""
    frames = torch.arange(n_frame, device=device)[:, None].expand(n_frame, n_hw).reshape(n_frame * n_hw)
    mask = torch.where(frames[None] <= frames[:, None], 0.0, float("-inf")).to(dtype)
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)


@contextmanager
def hunyuan_video() -> Iterator[None]:
    """Holds while HunyuanVideo 1.5's autoencoder is captured."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    with patched(HunyuanVideo15AttnBlock, "prepare_causal_attention_mask", staticmethod(_causal_mask)):
        yield


def _times_and_places(self: Any, timestep: Tensor) -> Tensor:
    """``ChromaCombinedTimestepTextProjEmbeddings.forward``, which makes a list as long as the batch."""
    guidance = self.guidance_proj(torch.zeros_like(timestep))
    times = torch.cat([self.time_proj(timestep), guidance], dim=1).to(timestep.dtype)
    places = self.mod_proj.to(timestep)
    count = timestep.shape[0]
    return torch.cat([times[:, None].expand(-1, places.shape[0], -1), places[None].expand(count, -1, -1)], dim=-1)


@contextmanager
def chroma() -> Iterator[None]:
    """Holds while Chroma's transformer is captured."""
    from diffusers.models.transformers.transformer_chroma import ChromaCombinedTimestepTextProjEmbeddings

    with patched(ChromaCombinedTimestepTextProjEmbeddings, "forward", _times_and_places):
        yield


def _positions(self: Any, hidden_states: Tensor) -> Tensor:
    """``CosmosLearnablePositionalEmbed.forward``, which gives NumPy a quotient of sizes."""
    tables = (self.pos_emb_t, self.pos_emb_h, self.pos_emb_w)
    counts = [size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True)]
    frames, rows, columns = (table[:count] for table, count in zip(tables, counts, strict=True))
    places = (frames[:, None, None] + rows[:, None] + columns).flatten(0, 2)
    length = torch.linalg.vector_norm(places, dim=-1, keepdim=True, dtype=torch.float32)
    places = places / (self.eps + length / math.sqrt(places.shape[-1]))
    return places.expand(hidden_states.shape[0], -1, -1).type_as(hidden_states)


class _Unaware:
    """Stands for torch in a module that makes tensors of sizes in an ONNX export: it reports no export."""

    onnx = SimpleNamespace(is_in_onnx_export=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def cosmos() -> Iterator[None]:
    """Holds while Cosmos' transformer is captured."""
    from diffusers.models.transformers import transformer_cosmos

    with (
        patched(transformer_cosmos.CosmosLearnablePositionalEmbed, "forward", _positions),
        patched(transformer_cosmos, "torch", _Unaware()),
    ):
        yield


def _experts(self: Any, x: Tensor, flat_expert_indices: Tensor, flat_expert_weights: Tensor) -> Tensor:
    """``MOEFeedForwardSwiGLU.moe_infer``, which sorts tokens in NumPy: all experts of all tokens, by weights or 0."""
    chosen = flat_expert_indices.view(x.shape[0], -1)
    weights = flat_expert_weights.view(x.shape[0], -1)
    result = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        weight = torch.where(chosen == number, weights, 0.0).sum(1, keepdim=True)
        has_chosen = (chosen == number).any(1, keepdim=True)  # an expert that is not chosen may give NaN
        result = result + torch.where(has_chosen, expert(x) * weight, 0.0)
    return result


@contextmanager
def hidream() -> Iterator[None]:
    """Holds while HiDream's transformer is captured."""
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    with patched(MOEFeedForwardSwiGLU, "moe_infer", _experts), images_of_any_number():
        yield


def _turns(self: Any, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """``OmniGenSuScaledRotaryEmbedding.forward``, which branches on the largest position: factors of short or of long texts."""
    is_long = position_ids.max() + 1 > self.original_max_position_embeddings
    short, long = (
        torch.tensor(factors, device=position_ids.device) for factors in (self.short_factor, self.long_factor)
    )
    powers = torch.arange(0, self.dim, 2, dtype=torch.int64, device=position_ids.device).float() / self.dim
    # As diffusers rounds: a quotient of positions of thousands is off by their last digits, which turn much.
    angles = position_ids[0, :, None].float() * (1.0 / (torch.where(is_long, long, short) * self.base**powers))
    angles = torch.cat([angles, angles], dim=-1)
    scale, factor = self.max_position_embeddings / self.original_max_position_embeddings, 1.0
    if scale > 1:
        factor = math.sqrt(1 + math.log(scale) / math.log(self.original_max_position_embeddings))
    return angles.cos() * factor, angles.sin() * factor


@contextmanager
def omnigen() -> Iterator[None]:
    """Holds while OmniGen's transformer is captured."""
    from diffusers.models.transformers.transformer_omnigen import OmniGenSuScaledRotaryEmbedding

    with patched(OmniGenSuScaledRotaryEmbedding, "forward", _turns):
        yield


class _Number(int):
    """A number of patches that differs from every dynamic number, for which positions are then computed."""

    def __ne__(self, other: object) -> bool:
        return isinstance(other, torch.SymInt) or int(self) != other

    __hash__ = int.__hash__


def _is_computed(embedding: Any) -> bool:
    """Whether a ``PatchEmbed`` keeps the positions that it would compute for its own height and width."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    kept = embedding.pos_embed
    if (
        embedding.pos_embed_max_size
        or kept is None
        or kept.dtype != torch.float32
        or kept.is_meta
        or isinstance(kept, FakeTensor)
    ):
        return False
    computed = get_2d_sincos_pos_embed(
        embed_dim=kept.shape[-1],
        grid_size=(embedding.height, embedding.width),
        base_size=embedding.base_size,
        interpolation_scale=embedding.interpolation_scale,
        device=kept.device,
        output_type="pt",
    )
    return torch.equal(computed.float()[None], kept)


@contextmanager
def places_of_any_size(model: nn.Module) -> Iterator[None]:
    """Holds while a model is captured that keeps sinusoidal positions for one height and width (PixArt)."""
    from diffusers.models.embeddings import PatchEmbed

    with ExitStack() as stack:
        for part in model.modules():
            if isinstance(part, PatchEmbed) and _is_computed(part):
                for name in ("height", "width"):
                    stack.enter_context(patched(part, name, _Number(getattr(part, name))))
        yield


@contextmanager
def of_any_size() -> Iterator[None]:
    """Holds while a model is captured."""
    from diffusers import UNet2DConditionModel
    from diffusers.models.upsampling import Upsample2D

    with ExitStack() as stack:
        stack.enter_context(patched(Upsample2D, "forward", _upsample))
        factor = _Factor()
        stack.enter_context(patched(UNet2DConditionModel, "num_upsamplers", property(lambda _: factor)))
        yield
