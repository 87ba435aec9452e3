"""Loops over the batch in diffusers' transformers (Mochi, HunyuanVideo 1.5, HiDream), replaced for batches of any size.

Mochi and HunyuanVideo take the valid tokens of each text by its mask; here they are brought to the front in all texts at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onnxplug_diffusers.exchanged import exchanged


def _in_front(valid: Tensor) -> Tensor:
    """The places of all tokens (batch, tokens): first the valid tokens, then the others, each in their order."""
    count = valid.shape[1]
    places = torch.arange(count, device=valid.device)
    # No two keys are equal, so that any sort gives this order.
    return places.where(valid, places + count).argsort(1)


# -- Mochi -------------------------------------------------------------------------------------------------------------


def _norm_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        """``MochiChunkedGroupNorm3D.forward``, which norms eight frames at a time: all at once."""
        if type(self.norm_layer) is not nn.GroupNorm:  # another norm may depend on the other frames
            return original(self, x)
        frames = self.norm_layer(x.permute(0, 2, 1, 3, 4).flatten(0, 1))
        result: Tensor = frames.unflatten(0, (x.shape[0], -1)).permute(0, 2, 1, 3, 4)
        return result

    return forward


@contextmanager
def mochi_autoencoder() -> Iterator[None]:
    """Holds while Mochi's autoencoder is captured."""
    from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D

    with exchanged(MochiChunkedGroupNorm3D, "forward", _norm_of):
        yield


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    parts = [even * cosines - odd * sines, even * sines + odd * cosines]
    return torch.stack([part.to(x.dtype) for part in parts], dim=-1).flatten(-2)


def _attention_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """``MochiAttnProcessor2_0.__call__``: a text's valid tokens follow its patches, then zeros."""
        if attention_mask.dim() != 2:
            return original(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

        def split(projections: tuple[Any, Any, Any], states: Tensor, norms: tuple[Any, Any]) -> list[Tensor]:
            query, key, value = (projection(states).unflatten(2, (attn.heads, -1)) for projection in projections)
            query, key = (x if norm is None else norm(x) for x, norm in zip((query, key), norms, strict=True))
            return [query, key, value]

        patches = split((attn.to_q, attn.to_k, attn.to_v), hidden_states, (attn.norm_q, attn.norm_k))
        if image_rotary_emb is not None:
            patches[:2] = [_turned(x, *image_rotary_emb) for x in patches[:2]]
        added = attn.norm_added_q, attn.norm_added_k
        texts = split((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), encoder_hidden_states, added)
        valid = attention_mask != 0
        order = _in_front(valid)
        valid = valid.gather(1, order)
        texts = [x.gather(1, order[:, :, None, None].expand_as(x)) for x in texts]
        query, key, value = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(patches, texts, strict=True))
        count = hidden_states.shape[1]
        valid = torch.cat([valid.new_ones((valid.shape[0], count)), valid], 1)
        states = nn.functional.scaled_dot_product_attention(query, key, value, valid[:, None, None])
        states = torch.where(valid[:, None, :, None], states, 0.0).transpose(1, 2).flatten(2, 3)
        of_patches, of_texts = states[:, :count], states[:, count:]
        of_patches = attn.to_out[1](attn.to_out[0](of_patches))
        return of_patches, attn.to_add_out(of_texts) if hasattr(attn, "to_add_out") else of_texts

    return call


@contextmanager
def mochi() -> Iterator[None]:
    """Holds while Mochi's transformer is captured."""
    from diffusers.models.attention_processor import MochiAttnProcessor2_0

    with exchanged(MochiAttnProcessor2_0, "__call__", _attention_of):
        yield


# -- HunyuanVideo 1.5 --------------------------------------------------------------------------------------------------


def _hunyuan_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        timestep_r: Tensor | None = None,
        encoder_hidden_states_2: Any = None,
        encoder_attention_mask_2: Any = None,
        image_embeds: Any = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """``HunyuanVideo15Transformer3DModel.forward``, which branches on whether there is an image: all of it is 0 without one."""
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        batch, _, frames, height, width = hidden_states.shape
        sizes = self.config.patch_size_t, self.config.patch_size, self.config.patch_size
        counts = [size // patch for size, patch in zip((frames, height, width), sizes, strict=True)]
        factors, times = self.rope(hidden_states), self.time_embed(timestep, timestep_r=timestep_r)
        states = self.x_embedder(hidden_states)
        texts = [
            self.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask),
            self.context_embedder_2(encoder_hidden_states_2),
        ]
        image, has_image = self.image_embedder(image_embeds), (image_embeds != 0).any()
        texts.append(torch.where(has_image, image, image * 0.0))
        kinds = (x.new_full(x.shape[:2], kind, dtype=torch.long) for kind, x in enumerate(texts))
        text, text_2, image = (x + self.cond_type_embed(kind) for x, kind in zip(texts, kinds, strict=True))
        mask, mask_2 = (given.bool() for given in (encoder_attention_mask, encoder_attention_mask_2))
        text, text_2 = (torch.where(given[:, :, None], x, 0.0) for x, given in ((text, mask), (text_2, mask_2)))
        mask = torch.cat([has_image.expand(image.shape[:2]), mask_2, mask], 1)
        order = _in_front(mask)
        mask, text = mask.gather(1, order), torch.cat([image, text_2, text], 1)
        text = text.gather(1, order[:, :, None].expand_as(text))
        for block in self.transformer_blocks:
            states, text = block(states, text, times, mask, factors)
        states = self.proj_out(self.norm_out(states, times)).reshape(batch, *counts, -1, *sizes)
        states = states.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=states) if return_dict else (states,)

    @functools.wraps(forward)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_checkpointed = torch.is_grad_enabled() and self.gradient_checkpointing
        return (original if is_checkpointed else scaled)(self, *args, **kwargs)

    from diffusers.utils import apply_lora_scale

    scaled = apply_lora_scale("attention_kwargs")(forward)
    return chosen


@contextmanager
def hunyuan_video() -> Iterator[None]:
    """Holds while HunyuanVideo 1.5's transformer is captured."""
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel

    with exchanged(HunyuanVideo15Transformer3DModel, "forward", _hunyuan_of):
        yield


# -- HiDream -----------------------------------------------------------------------------------------------------------


class _Grid:
    """The numbers of patches of images of one size, in place of a tensor with the numbers of each image."""

    def __init__(self, rows: Any, columns: Any) -> None:
        self.rows, self.columns = rows, columns


def _patches_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def patchify(self: Any, hidden_states: Tensor) -> Any:
        """``HiDreamImageTransformer2DModel.patchify``."""
        patches, masks, _, places = original(self, hidden_states)
        rows, columns = (size // self.config.patch_size for size in hidden_states.shape[2:])
        return patches, masks, _Grid(rows, columns), places

    return patchify


def _images_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def unpatchify(self: Any, x: Tensor, img_sizes: Any, is_training: bool) -> Tensor:
        """``HiDreamImageTransformer2DModel.unpatchify``, which has a loop over the images."""
        if not isinstance(img_sizes, _Grid) or (is_training and not self.config.force_inference_output):
            return original(self, x, img_sizes, is_training)
        rows, columns, side = img_sizes.rows, img_sizes.columns, self.config.patch_size
        x = x[:, : rows * columns].unflatten(1, (rows, columns)).unflatten(3, (side, side, -1))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    return unpatchify


@contextmanager
def hidream() -> Iterator[None]:
    """Holds while HiDream's transformer is captured."""
    from diffusers.models.transformers.transformer_hidream_image import HiDreamImageTransformer2DModel

    with (
        exchanged(HiDreamImageTransformer2DModel, "patchify", _patches_of),
        exchanged(HiDreamImageTransformer2DModel, "unpatchify", _images_of),
    ):
        yield
