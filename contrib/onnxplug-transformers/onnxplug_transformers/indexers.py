"""Sparse attention while a model is captured: the tokens that each query sees, without loops over queries and their blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.patches.scans import scanned
from onnxplug_transformers.exchanged import modeling_of


def selected_tokens(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: Any,
) -> Tensor:
    """Qwen4's indexer: of the tokens that a query may see, it sees the best blocks and an incomplete last block.

    A block's key is the mean of its tokens' keys. A Scan over the queries keeps the keys of one query's blocks at a
    time.

    Args:
        self: The module ``Qwen4ExpTextQSAIndexer``.
        hidden_states: [batch, queries, width]
        position_embeddings: Cosines and sines of all keys' positions, [batch, keys, rotated size].
        attention_mask: The keys that a query may see, [batch, 1, queries, keys]: True, or a float 0.
        cache: The cache, or ``None``.

    Returns:
        True for the keys that a query sees, [batch, 1, queries, keys].
    """
    rotated = vars(modeling_of(self))["apply_rotary_pos_emb"]
    batch, queries, _ = hidden_states.shape
    size, ratio, most = self.index_head_dim, self.compress_ratio, self.block_topk
    cos, sin = position_embeddings
    widths = [self.index_n_heads * size, self.index_kv_heads * size]
    query, keys = self.index_qk_proj(hidden_states).split(widths, dim=-1)
    query = self.q_layernorm(query.reshape(batch, queries, -1, size))
    query = rotated(query, cos=cos[:, -queries:, :], sin=sin[:, -queries:, :], unsqueeze_dim=2)
    keys = keys.reshape(batch, queries, -1, size).squeeze(2)
    if cache is not None:
        keys = cache.update_indexer(keys, self.layer_idx)
    visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
    tokens = attention_mask.shape[-1]
    # At least as many blocks as are chosen; blocks beyond the tokens never are. The visible tokens come first, in
    # order.
    blocks = (tokens + ratio - 1) // ratio + most
    device = hidden_states.device
    places = torch.arange(tokens, device=device).where(visible, tokens).sort(-1).values.clamp(max=tokens - 1)
    places = functional.pad(places, (0, blocks * ratio - tokens)).unflatten(-1, (blocks, ratio))
    full = torch.arange(blocks, device=device) < (visible.sum(-1, keepdim=True) // ratio)

    def taken(of: Tensor, places: Tensor) -> Tensor:
        return of.gather(1, places.unsqueeze(-1).expand(-1, -1, of.shape[-1]))

    def step(state: Tensor, token: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        query, places = token
        means = taken(keys, places.flatten(1)).unflatten(1, (-1, ratio)).float().mean(2).to(keys.dtype)
        firsts = places[:, :, 0]
        means = rotated(
            self.k_layernorm(means).unsqueeze(2), cos=taken(cos, firsts), sin=taken(sin, firsts), unsqueeze_dim=2
        )
        return state.clone(), (query.float() @ means.squeeze(2).float().mT).relu().sum(1) / math.sqrt(size)

    _, scores = scanned(step, torch.zeros(1, device=device), (query.transpose(0, 1), places.transpose(0, 1)))
    best = scores.transpose(0, 1).masked_fill(~full, -1.0).topk(most).indices
    chosen = torch.zeros_like(full).scatter(-1, best, True) & full
    block = ((visible.cumsum(-1) - 1) // ratio).clamp(min=0)
    return (visible & (chosen.gather(-1, block) | ~full.gather(-1, block))).unsqueeze(1)
