"""Positions that transformers keeps in Python, as long as the example's sequence, while a model is captured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import exchanged, in_use, never

#: Families whose rotary positions are kept for the last call's length, and the attributes that keep them.
_ROTARY = ("Clvp", "SeamlessM4TConformer", "Wav2Vec2Bert", "Wav2Vec2Conformer")
_KEPT = ("cached_sequence_length", "cached_rotary_positional_embedding")


@contextlib.contextmanager
def positions_of_any_length() -> Iterator[None]:
    """Holds while a model is captured.

    The positions of Funnel and Reformer, the masks of CPM-Ant and FSMT, and rotary positions kept for an earlier length
    are exchanged.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            exchanged(
                {
                    "FunnelAttentionStructure.get_position_embeds": (get_position_embeds, _is_factorized),
                    "CpmAntModel._prepare_attention_mask": (_prepare_attention_mask, never),
                    "make_padding_mask": (make_padding_mask, never),
                    "AxialPositionEmbeddings.forward": (axial_embeddings, _is_trained),
                }
            )
        )
        for family in _ROTARY:
            for owner, name, before in in_use(f"{family}RotaryPositionalEmbedding.forward"):
                stack.enter_context(patched(owner, name, _forgetful(before)))
        yield


def _is_trained(self: Any, position_ids: Tensor) -> bool:
    return bool(self.training)


def axial_embeddings(self: Any, position_ids: Tensor) -> Tensor:
    """Reformer's embeddings of positions, in a grid of two axes, one row after another; transformers loops over the batch.

    Args:
        position_ids: [batch, tokens].

    Returns:
        [batch, tokens, width].

    Raises:
        ValueError: The grid has fewer places than there are tokens.
    """
    rows, columns = self.axial_pos_shape
    if rows * columns < position_ids.shape[1]:
        raise ValueError(f"config.axial_pos_shape {self.axial_pos_shape} has fewer places than there are tokens.")
    of_rows, of_columns = self.weights
    places = torch.div(position_ids, columns, rounding_mode="floor"), position_ids % columns
    return torch.cat((embedding(places[0], of_rows[:, 0]), embedding(places[1], of_columns[0])), -1)


def _forgetful(before: Callable[..., Any]) -> Callable[..., Any]:
    """A method that computes its result as if called for the first time, and leaves the kept values as they were."""

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name in _KEPT:
                stack.enter_context(patched(self, name, None))
            return before(self, *args, **kwargs)

    return forward


class _Positions(NamedTuple):
    """A first position, and after it other positions at equal distances.

    Attributes:
        first: The first position.
        second: The position after it.
        step: The distance between positions from the second on.
        others: The number of positions after the first.
    """

    first: int
    second: int
    step: int
    others: Any

    def pooled(self, block: int, of_class: bool, cut: bool) -> _Positions:
        """Every second position; the class token's stays, if ``of_class``, and the last position may be cut off."""
        if of_class:
            return _Positions(1 - 2**block, self.second, 2 * self.step, (self.others + (0 if cut else 1)) // 2)
        return _Positions(self.first, self.first + 2 * self.step, 2 * self.step, self.others // 2)

    def distances(self, stride: int, pooled: _Positions, shift: int, device: Any) -> Tensor:
        """All distances from ``pooled`` to these positions, the largest first."""
        last = self.second + self.step * (self.others - 1)
        largest = pooled.first - self.first + shift * (pooled.others + 1) * stride
        return torch.arange(largest, pooled.first - last - 1, -stride, dtype=torch.long, device=device)


def _is_factorized(self: Any, *_: Any, **__: Any) -> bool:
    return bool(self.config.attention_type == "factorized")


def get_position_embeds(self: Any, seq_len: Any, dtype: torch.dtype, device: torch.device) -> list[list[Tensor | None]]:
    """Funnel's sines and cosines of all distances, for each block: within its positions, and from the block before."""
    width, config = self.config.d_model // 2, self.config
    frequencies = 1 / (10000 ** (torch.arange(width, dtype=torch.int64, device=device).to(dtype) / width))
    farthest = seq_len * 2
    angles = torch.arange(-farthest, farthest, dtype=torch.int64, device=device).to(dtype)[:, None] * frequencies
    table = torch.cat([self.sin_dropout(angles.sin()), self.cos_dropout(angles.cos())], -1)
    positions, results = _Positions(0, 1, 1, seq_len - 1), []
    for block in range(config.num_blocks):
        pooling = None
        if block:
            pooled = positions.pooled(block, config.separate_cls, config.truncate_seq)
            pooling = table[positions.distances(2 ** (block - 1), pooled, 2, device) + farthest]
            positions = pooled
        results.append([table[positions.distances(2**block, positions, 1, device) + farthest], pooling])
    return results


def _prepare_attention_mask(self: Any, input_ids: Tensor, span: Tensor, context: Tensor, length: Tensor) -> Tensor:
    """CPM-Ant's mask: all see the prompt, later tokens see the tokens before them, none sees padding on the left."""
    tokens = input_ids.shape[1]
    places = torch.arange(tokens, device=input_ids.device)
    visible = context[:, None, :] | (~context[:, :, None] & (places <= places[:, None]))
    visible = visible & (span[:, None, :] == span[:, :, None])
    known = (places < self.prompt_length) | (tokens - 1 - places < length[:, None])
    return known[:, :, None] & known[:, None, :] & visible


def make_padding_mask(input_ids: Tensor, padding_idx: int = 1) -> Tensor:
    """FSMT's mask: True for padding; transformers has no mask for a batch without padding, with the same results."""
    return input_ids.eq(padding_idx)
