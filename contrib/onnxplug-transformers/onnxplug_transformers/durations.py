"""FastSpeech 2's frames, whose number for each token is its duration, while a model is captured.

transformers loops over the batch, repeats each text's tokens, and branches on whether all durations are 0. Here the token of each
frame is the number of tokens that end before it or with it. Positions are computed for the sequence's length, where transformers
keeps the positions of a length of 5000, and computes others once a sequence is longer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug_transformers.exchanged import exchanged, never


@contextlib.contextmanager
def frames_of_any_duration() -> Iterator[None]:
    """Holds while a model is captured; durations that are not whole numbers are left to transformers, which refuses them."""
    with exchanged(
        {
            "length_regulator": (length_regulator, _is_refused),
            "FastSpeech2ConformerRelPositionalEncoding.forward": (_positions, never),
        }
    ):
        yield


def _is_refused(encoded_embeddings: Tensor, duration_labels: Tensor, speaking_speed: float = 1.0) -> bool:
    return speaking_speed <= 0 or (speaking_speed == 1.0 and duration_labels.dtype not in (torch.int32, torch.int64))


def length_regulator(encoded_embeddings: Tensor, duration_labels: Tensor, speaking_speed: float = 1.0) -> Tensor:
    """Each token's states, repeated.

    Where all durations of the batch are 0, they become 1, also in the given tensor if the speed is 1.

    Args:
        encoded_embeddings: [batch, tokens, width].
        duration_labels: How many frames a token has, 0 or more, [batch, tokens].
        speaking_speed: The factor of the durations.

    Returns:
        [batch, frames, width] of float32; after a text's last frame, zeros.
    """
    if speaking_speed != 1.0:
        duration_labels = torch.round(duration_labels.float() * speaking_speed).long()
    counts = duration_labels.sum(1)
    duration_labels.masked_fill_((counts == 0)[:, None] & (counts.sum() == 0), 1)
    ends = duration_labels.cumsum(1)
    counts = duration_labels.sum(1)
    frames: Any = counts.max().item()
    torch._check(frames >= 1)
    # How many tokens end at each frame; the last place counts the tokens that end with the longest text.
    ending = torch.zeros((ends.shape[0], frames + 1), dtype=torch.int64, device=ends.device)
    ending = ending.scatter_add(1, ends, torch.ones_like(ends))
    places = ending.cumsum(1)[:, :frames].clamp(max=ends.shape[1] - 1)
    states = encoded_embeddings.gather(1, places[:, :, None].expand(-1, -1, encoded_embeddings.shape[2]))
    is_there = torch.arange(frames, device=ends.device) < counts[:, None]
    return states.float().where(is_there[:, :, None], 0.0)


def _positions(self: Any, feature_representation: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled states, and the embedding of each distance, from the largest distance, [1, 2 * time - 1, width]."""
    states, time = feature_representation, feature_representation.shape[1]
    distances = time - 1 - torch.arange(2 * time - 1, device=states.device)
    # In float32, as in transformers.
    steps = torch.arange(0, self.embed_dim, 2, dtype=torch.int64, device=states.device).float()
    angles = distances.float()[:, None] * torch.exp(steps * -(math.log(10000.0) / self.embed_dim))
    positions = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[None].to(states.dtype)
    return self.dropout(states * self.input_scale), self.dropout(positions)
