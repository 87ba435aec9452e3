"""Operators of com.microsoft by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onnxplug_reference.kernels import Kernel


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function."""
    return F.gelu(x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Gelu of x + bias."""
    return F.gelu(x + bias)


def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gelu's approximation by tanh."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    """alpha A B, with axes of both swapped."""

    def arranged(x: Tensor, swapped: int, batch: int) -> Tensor:
        x = x.movedim(0, -2) if batch and x.dim() > 2 else x
        return x.mT if swapped and x.dim() > 1 else x

    return torch.matmul(arranged(a, transA, transBatchA), arranged(b, transB, transBatchB)) * alpha


def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Any, ...]:
    """The last axis of x + skip + bias, normalised; the sum is the fourth result."""
    total = x + skip if bias is None else x + skip + bias
    mean = total.float().mean(-1, keepdim=True)
    inverse = torch.rsqrt(total.float().var(-1, correction=0, keepdim=True) + epsilon)
    return F.layer_norm(total, (x.shape[-1],), gamma, beta, epsilon), mean, inverse, total


def skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple[Any, ...]:
    """The last axis of x + skip + bias over the root of its mean square; the sum is the fourth result."""
    total = x + skip if bias is None else x + skip + bias
    inverse = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return F.rms_norm(total, (x.shape[-1],), gamma, epsilon), None, inverse, total


def simplified_layer_normalization(
    x: Tensor, gamma: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, Tensor]:
    """The axes from one on over the root of their mean square."""
    axes = list(range(axis % x.dim(), x.dim()))
    inverse = torch.rsqrt(x.float().pow(2).mean(axes, keepdim=True) + epsilon)
    return F.rms_norm(x, x.shape[axes[0] :], gamma, epsilon), inverse


def rotary_embedding(
    x: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Pairs of elements of each head as complex numbers, turned by the angles of each position."""
    size = x.shape[-1] // num_heads if num_heads else 2 * cos_cache.shape[-1]
    heads = x if x.dim() == 4 else x.unflatten(-1, (-1, size)).transpose(1, 2)
    places = position_ids
    if position_ids.dim() == 1:
        places = position_ids + torch.arange(heads.shape[2], device=x.device)[None]
    turn = torch.complex(cos_cache[places].float(), sin_cache[places].float())[:, None]
    pairs = cos_cache.shape[-1]
    part, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
    shaped = part.unflatten(-1, (pairs, 2)) if interleaved else part.unflatten(-1, (2, pairs)).mT
    turned = torch.view_as_real(torch.view_as_complex(shaped.float().contiguous()) * turn)
    back = (turned if interleaved else turned.mT).flatten(-2)
    result = torch.cat([back.to(x.dtype), rest], -1)
    return result if x.dim() == 4 else result.transpose(1, 2).flatten(2)


def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float | None = None,
    unidirectional: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    """Attention of heads by ``scaled_dot_product_attention``; masks become a bias of the scores."""
    if query.dim() == 5 or key is None or key.dim() != 3 or value is None or outputs > 3:
        raise NotImplementedError("packed heads, ready ones, and scores are computed in NumPy")
    if bias is not None:
        widths = [query.shape[-1], key.shape[-1], value.shape[-1]]
        query, key, value = (x + b for x, b in zip((query, key, value), bias.split(widths), strict=True))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    total = k.shape[2]
    added = torch.zeros((1, 1, q.shape[2], total), dtype=q.dtype, device=q.device)
    if key_padding_mask is not None:
        mask = key_padding_mask
        seen = torch.arange(total, device=q.device)[None] < mask[:, None] if mask.dim() == 1 else mask != 0
        seen = seen[:, None, None] if seen.dim() == 2 else seen[:, None]
        added = added + torch.where(seen, 0.0, mask_filter_value).to(q.dtype)
    if unidirectional:
        later = torch.ones(q.shape[2], total, dtype=torch.bool, device=q.device).triu(1 + total - q.shape[2])
        added = added.masked_fill(later, torch.finfo(q.dtype).min)
    if attention_bias is not None:
        added = added + attention_bias
    result = F.scaled_dot_product_attention(q, k, v, added, scale=scale or None)
    return result.transpose(1, 2).flatten(2), k, v


def matmul_nbits(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
) -> Tensor:
    """A times a matrix of integers in blocks, made float first."""
    if g_idx is not None:
        raise NotImplementedError("blocks of columns by g_idx are computed in NumPy")
    blocks = -(-K // block_size)
    codes = _unpacked(b.reshape(N, blocks, -1), bits)
    zero: Any = 2 ** (bits - 1)
    if zero_points is not None:
        packed = zero_points.dtype == torch.uint8
        zero = _unpacked(zero_points.reshape(N, -1), bits)[:, :blocks] if packed else zero_points.reshape(N, blocks)
        zero = zero.to(a.dtype)[..., None]
    weight = (codes.to(a.dtype) - zero) * scales.reshape(N, blocks, 1)
    return F.linear(a, weight.reshape(N, -1)[:, :K], bias)


def _unpacked(blob: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=blob.device, dtype=torch.int32)
    return ((blob.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _kernel(op: str, function: Callable[..., Any]) -> Kernel:
    return Kernel(op, function, domain="com.microsoft")


KERNELS = [
    _kernel("Gelu", gelu),
    _kernel("BiasGelu", bias_gelu),
    _kernel("FastGelu", fast_gelu),
    _kernel("QuickGelu", quick_gelu),
    _kernel("FusedMatMul", fused_matmul),
    _kernel("MatMulNBits", matmul_nbits),
    _kernel("MultiHeadAttention", multi_head_attention),
    _kernel("RotaryEmbedding", rotary_embedding),
    _kernel("SkipLayerNormalization", skip_layer_normalization),
    _kernel("SkipSimplifiedLayerNormalization", skip_simplified_layer_normalization),
    _kernel("SimplifiedLayerNormalization", simplified_layer_normalization),
    Kernel("SimplifiedLayerNormalization", simplified_layer_normalization),
]
