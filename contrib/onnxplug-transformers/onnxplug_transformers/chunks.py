"""Recurrences by chunks of tokens: a scan over the chunks, and products of matrices within each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.patches.scans import scanned


def by_chunks(
    step: Callable[..., Any], state: Tensor, sequences: Sequence[Tensor], chunk: int
) -> tuple[Tensor, Tensor]:
    """A scan over chunks of tokens, padded with zeros at the end; fewer tokens than a chunk are one of their length.

    Args:
        step: From a state and slices [batch, heads, chunk, ...] to the next state and a result of this shape.
        sequences: [batch, sequence, heads, ...]

    Returns:
        The last state, and [batch, sequence, heads, ...].
    """
    length = sequences[0].shape[1]
    chunk = torch.sym_min(chunk, length)
    count = (length + chunk - 1) // chunk
    padding = count * chunk - length

    def chunks(x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, 0, 0, padding))
        return padded.unflatten(1, (count, chunk)).permute(1, 0, 3, 2, 4)

    state, results = scanned(step, state, tuple(chunks(x) for x in sequences))
    return state, results.permute(1, 0, 3, 2, 4).flatten(1, 2).split([length, padding], dim=1)[0]


def left_by(since: Tensor) -> Tensor:
    """The factor by which each token's contribution has decayed at each later token of a chunk: [..., chunk, chunk]."""
    return (since - since.mT).masked_fill(~visible_tokens(since), float("-inf")).exp()


def visible_tokens(since: Tensor) -> Tensor:
    places = torch.arange(since.shape[-2], device=since.device)
    return places[:, None] >= places
