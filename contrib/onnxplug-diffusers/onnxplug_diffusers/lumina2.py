"""Lumina 2's transformer without its loops over the batch: each caption has a length of its own, which its mask gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.patching import patched


class _Joint:
    """The sequences of a batch: each caption as far as its length, its patches after it, then padding.

    ``mask`` (batch, text) is true where a caption has a token. A joint sequence is as long as the longest caption could make it.
    """

    def __init__(self, mask: Tensor, patches: int) -> None:
        self.batch, self.text = mask.shape
        self.patches = patches
        self.lengths = mask.sum(1, keepdim=True)
        places = torch.arange(self.text + patches, device=mask.device)
        self.mask = places < self.lengths + patches
        # The place in the caption, the patches and one element of padding, one after another.
        after = torch.where(self.mask, places - self.lengths + self.text, self.text + patches)
        self.sources = torch.where(places < self.lengths, places, after)

    def join(self, text: Tensor, patches: Tensor) -> Tensor:
        """(batch, text + patches, features) of captions (batch, text, features) and patches (batch, patches, features)."""
        padding = torch.zeros_like(patches[:, :1])
        return _taken(torch.cat([text, patches, padding], 1), self.sources)

    def patches_of(self, joint: Tensor) -> Tensor:
        """(batch, patches, features) of joint sequences."""
        return _taken(joint, self.lengths + torch.arange(self.patches, device=joint.device))

    def factors(self, embedder: Any, columns: int) -> tuple[Tensor, Tensor]:
        """The rotary embeddings of captions and patches, (batch, text, features) and (batch, patches, features)."""
        places = torch.arange(self.text, device=self.mask.device).expand(self.batch, -1)
        is_text = places < self.lengths
        places = torch.where(is_text, places, 0)
        zero = torch.zeros_like(places)
        of_text = embedder._get_freqs_cis(torch.stack([places, zero, zero], -1))
        patch = torch.arange(self.patches, device=self.mask.device)
        positions = [self.lengths, patch // columns, patch % columns]
        of_patches = torch.stack([position.expand(self.batch, self.patches) for position in positions], -1)
        return torch.where(is_text[..., None], of_text, 0.0), embedder._get_freqs_cis(of_patches)


def _taken(sequences: Tensor, places: Tensor) -> Tensor:
    """The elements of sequences (batch, length, features) at places (batch, n)."""
    return sequences.gather(1, places[..., None].expand(-1, -1, sequences.shape[-1]))


def _forward(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
) -> Any:
    """``Lumina2Transformer2DModel.forward``."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    batch, channels, height, width = hidden_states.shape
    size, embedder = self.config.patch_size, self.rope_embedder
    rows, columns = height // embedder.patch_size, width // embedder.patch_size
    times, text = self.time_caption_embed(hidden_states, timestep, encoder_hidden_states)
    joint = _Joint(encoder_attention_mask, rows * columns)
    of_text, of_patches = joint.factors(embedder, columns)
    patches = hidden_states.view(batch, channels, rows, embedder.patch_size, columns, embedder.patch_size)
    patches = self.x_embedder(patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
    for layer in self.context_refiner:
        text = layer(text, encoder_attention_mask, of_text)
    for layer in self.noise_refiner:
        patches = layer(patches, None, of_patches, times)
    together, factors = joint.join(text, patches), joint.join(of_text, of_patches)
    for layer in self.layers:
        together = layer(together, joint.mask, factors, times)
    patches = joint.patches_of(self.norm_out(together, times))
    images = patches.view(batch, height // size, width // size, size, size, self.out_channels)
    images = images.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    return Transformer2DModelOutput(sample=images) if return_dict else (images,)


@contextmanager
def of_any_batch() -> Iterator[None]:
    """Holds while Lumina 2's transformer is captured."""
    from diffusers.models.transformers.transformer_lumina2 import Lumina2Transformer2DModel
    from diffusers.utils import apply_lora_scale

    with patched(Lumina2Transformer2DModel, "forward", apply_lora_scale("attention_kwargs")(_forward)):
        yield
