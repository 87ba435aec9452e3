"""Evolla's adapters, which read proteins where a mask has any, while a model is captured.

transformers branches on the masks' values; here the adapter is always computed, and its result taken if any mask shows
a place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug_transformers.exchanged import exchanged, never


@contextlib.contextmanager
def proteins_read_by_masks() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged({"EvollaSequenceAlignerCrossAttention.forward": (aligned, never)}):
        yield


def aligned(
    self: Any,
    query_states: Tensor,
    protein_kv_states: Tensor | None,
    structure_kv_states: Tensor | None,
    msa_kv_states: Tensor | None,
    query_attn_mask: Tensor | None,
    protein_kv_attn_mask: Tensor | None = None,
    structure_kv_attn_mask: Tensor | None = None,
    msa_kv_attn_mask: Tensor | None = None,
    protein_batch_mask: Tensor | None = None,
    structure_batch_mask: Tensor | None = None,
    msa_batch_mask: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """The text's states [batch, tokens, width] after the adapter, or as they are if no mask shows a place.

    Args:
        protein_kv_states: States of each protein, [batch, places, width]; ``structure_kv_states`` and ``msa_kv_states``
            are states of structures and of alignments.
        protein_kv_attn_mask: Not 0 for places that are shown, [batch, places]; ``None``: all places of each protein
            that ``protein_batch_mask``, [batch], shows.
    """
    kinds = (
        ("protein", protein_kv_states, protein_kv_attn_mask, protein_batch_mask),
        ("structure", structure_kv_states, structure_kv_attn_mask, structure_batch_mask),
        ("msa", msa_kv_states, msa_kv_attn_mask, msa_batch_mask),
    )
    given: dict[str, Tensor | None] = {}
    for kind, states, mask, of_batch in kinds:
        if states is not None and mask is None:
            assert of_batch is not None
            mask = (torch.ones(states.shape[:2], device=of_batch.device) * of_batch[:, None]).to(states.device)
        given |= {f"{kind}_key_value_states": states, f"{kind}_kv_attn_mask": None if states is None else mask}
    masks = [mask for name, mask in given.items() if name.endswith("mask") and mask is not None]
    if not masks:
        return query_states
    read = self.cross_attention(query_states=query_states, query_attn_mask=query_attn_mask, **given)
    states = query_states + torch.tanh(self.gate_attention) * read
    states = states + self.ff(states) * torch.tanh(self.gate_ffw)
    is_any = torch.stack([mask.any().to(query_states.device) for mask in masks]).any()
    return states.where(is_any, query_states)
