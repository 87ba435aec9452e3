"""Layers that a trace without gradients records as a single torch operator without a decomposition, computed by their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

#: The forms of a mask by their numbers: of queries and keys, of the keys of each sequence, of both for each head.
_OF_SCORES, _OF_KEYS, _OF_HEADS = range(3)


def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """``aten::_transformer_encoder_layer_fwd``: ``src`` and the result are (batch, sequence, embed_dim)."""

    def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, [embed_dim], weight, bias, eps)

    def attended(x: torch.Tensor) -> torch.Tensor:
        packed = (x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask)
        return attention(*packed, need_weights=False, mask_type=mask_type)[0]

    def fed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        return functional.linear(
            functional.gelu(hidden) if use_gelu else functional.relu(hidden), ffn_weight_2, ffn_bias_2
        )

    if norm_first:
        x = src + attended(normed(src, norm_weight_1, norm_bias_1))
        return x + fed_forward(normed(x, norm_weight_2, norm_bias_2))
    x = normed(src + attended(src), norm_weight_1, norm_bias_1)
    return normed(x + fed_forward(x), norm_weight_2, norm_bias_2)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``aten::_native_multi_head_attention``: inputs are (batch, sequence, embed_dim), the weights (batch, query, key)."""
    weights = qkv_weight.chunk(3)
    biases = qkv_bias.chunk(3)
    projections = zip((query, key, value), weights, biases, strict=True)
    # (batch, head, sequence, size of a head)
    q, k, v = (functional.linear(x, w, b).unflatten(-1, [num_head, -1]).transpose(1, 2) for x, w, b in projections)
    if mask is None and not need_weights:
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return functional.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias), None
    scores = torch.matmul(q * (embed_dim // num_head) ** -0.5, k.transpose(-2, -1))
    if mask is not None:  # a query that sees nothing is NaN, where scaled_dot_product_attention gives 0
        mask = mask.to(torch.bool)
        scores = scores.masked_fill(mask[:, None, None, :] if mask_type == _OF_KEYS else mask, float("-inf"))
    probabilities = torch.softmax(scores, -1)
    mixed = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    result = functional.linear(mixed, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, probabilities.mean(1) if average_attn_weights else probabilities


FUSED: dict[str, Callable[..., Any]] = {
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
    "aten::_native_multi_head_attention": attention,
}
