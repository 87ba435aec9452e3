"""Attention of com.microsoft. Heads are [batch, heads, sequence, head size] throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import microsoft
from onnxplug_reference.numeric import typed

#: ONNX Runtime's default of ``mask_filter_value``, the summand of masked scores.
_MASKED = -10000.0
#: ONNX Runtime's summand of the scores of later keys.
_NEVER = np.finfo(np.float32).min


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    """[batch, sequence, heads * size] to [batch, heads, sequence, size]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def rows_of(x: np.ndarray) -> np.ndarray:
    """[batch, heads, sequence, size] to [batch, sequence, heads * size]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def probabilities(scores: np.ndarray, sink: np.ndarray | None = None) -> np.ndarray:
    """Softmax over the last axis; ``sink``, a number per head, counts in the sum only. A row of -inf gives zeros."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(np.isneginf(top), 0, top)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total != 0)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotates pairs of the first elements of each head.

    Args:
        x: [batch, heads, sequence, size].
        cos, sin: [batch or 1, sequence, pairs]; the first 2 * pairs elements are rotated.
        interleaved: Whether a pair are neighbours; otherwise a pair is from the two halves of the rotated elements.
    """
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    cos, sin = cos[:, None], sin[:, None]
    left, right = first * cos - second * sin, first * sin + second * cos
    both = np.stack([left, right], -1).reshape(turned.shape) if interleaved else np.concatenate([left, right], -1)
    return np.concatenate([both, rest], -1)


def rotary_embedding(
    x: np.ndarray,
    position_ids: np.ndarray,
    cos_cache: np.ndarray,
    sin_cache: np.ndarray,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> np.ndarray:
    """Rotates x, [batch, sequence, heads * size] or [batch, heads, sequence, size], by the angles of each position.

    Args:
        position_ids: [batch, sequence], or [1] for the first position.
        cos_cache, sin_cache: [positions, pairs].
    """
    if x.ndim == 4:
        heads = x
    else:
        size = x.shape[-1] // num_heads if num_heads else 2 * cos_cache.shape[-1]
        heads = heads_of(x, x.shape[-1] // size)
    places = position_ids
    if position_ids.size == 1 and position_ids.ndim == 1:
        places = position_ids.reshape(1, 1) + np.arange(heads.shape[2])[None]
    result = rotated(heads, cos_cache[places], sin_cache[places], bool(interleaved))
    return typed(result if x.ndim == 4 else rows_of(result), x)


def multi_head_attention(
    query: np.ndarray,
    key: np.ndarray | None = None,
    value: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_padding_mask: np.ndarray | None = None,
    attention_bias: np.ndarray | None = None,
    past_key: np.ndarray | None = None,
    past_value: np.ndarray | None = None,
    past_sequence_length: np.ndarray | None = None,
    cache_indirection: np.ndarray | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = _MASKED,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[np.ndarray, ...]:
    """Attention with keys for each head: [batch, sequence, heads * size], keys, values and scores.

    Args:
        query: [batch, sequence, hidden], or with keys and values [batch, sequence, heads, 3, size].
        key: [batch, keys, hidden], with values [batch, keys, heads, 2, size], or ready heads.
        value: [batch, keys, hidden], or ready heads.
        bias: [hidden of query + of key + of value].
        key_padding_mask: Numbers of keys, [batch], or a mask with 0 for hidden keys, [batch, keys] or [batch, sequence,
            keys].
        attention_bias: [batch or 1, heads or 1, sequence, keys], added to the scores.
    """
    if past_sequence_length is not None or cache_indirection is not None:
        raise EvaluationError("buffers shared between past and present are ONNX Runtime's alone")
    q, k, v = _projected(query, key, value, bias, num_heads)
    if past_key is not None and past_value is not None:
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    scores = _scores(q, k, scale)
    total, rows = k.shape[2], q.shape[2]
    masks = _mask(key_padding_mask, total, mask_filter_value)
    if unidirectional:
        masks = np.where(_later(rows, total), _NEVER, masks)
    scores = scores + masks
    if attention_bias is not None:
        scores = scores + attention_bias
    return typed(rows_of(probabilities(scores) @ v), query), typed(k, query), typed(v, query), typed(scores, query)


def _projected(
    query: np.ndarray, key: np.ndarray | None, value: np.ndarray | None, bias: np.ndarray | None, heads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads of queries, keys and values with their biases, from any of the packings."""
    if query.ndim == 5:
        q, k, v = (part.transpose(0, 2, 1, 3) for part in np.moveaxis(query, 3, 0))
    elif key is None:
        raise EvaluationError("there are no keys")
    else:
        q = heads_of(query, heads)
        if key.ndim == 5:
            k, v = (part.transpose(0, 2, 1, 3) for part in np.moveaxis(key, 3, 0))
        elif value is None:
            raise EvaluationError("there are no values")
        else:
            k, v = (part if part.ndim == 4 else heads_of(part, heads) for part in (key, value))
    if bias is None:
        return q, k, v
    sizes = [heads * part.shape[-1] for part in (q, k, v)]
    parts = np.split(bias, np.cumsum(sizes)[:-1])
    ready = [False, *(part is not None and part.ndim == 4 for part in (key, value))]
    shifted = [
        part if done else part + b.reshape(1, heads, 1, -1)
        for part, b, done in zip((q, k, v), parts, ready, strict=True)
    ]
    return shifted[0], shifted[1], shifted[2]


def _scores(q: np.ndarray, k: np.ndarray, scale: float | None) -> np.ndarray:
    factor = scale or 1 / np.sqrt(q.shape[-1])
    return (q @ k.swapaxes(-1, -2)) * np.float32(factor)


def _mask(mask: np.ndarray | None, total: int, masked: float) -> np.ndarray:
    """The summand of scores [batch, heads, sequence, keys] for a mask of any form."""
    if mask is None:
        return np.zeros((1, 1, 1, 1), np.float32)
    if mask.ndim == 1:
        seen = (np.arange(total)[None] < mask[:, None])[:, None, None, :]
    elif mask.ndim == 2:
        seen = (mask != 0)[:, None, None, :]
    else:
        seen = (mask != 0)[:, None, :, :]
    return np.where(seen, np.float32(0), np.float32(masked))


def _later(rows: int, total: int) -> np.ndarray:
    """The mask of keys that come after a query, [sequence, keys]. The last query sees all keys."""
    return np.arange(total)[None] > np.arange(rows)[:, None] + (total - rows)


def attention(
    x: np.ndarray,
    weights: np.ndarray,
    bias: np.ndarray | None = None,
    mask_index: np.ndarray | None = None,
    past: np.ndarray | None = None,
    attention_bias: np.ndarray | None = None,
    past_sequence_length: np.ndarray | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = _MASKED,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Projects x to queries, keys and values, [hidden, all three], then attends; past and present are [2, ...heads]."""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise EvaluationError("rotation and buffers shared between past and present are ONNX Runtime's alone here")
    every = x @ weights if bias is None else x @ weights + bias
    widths = list(qkv_hidden_sizes) if qkv_hidden_sizes else [weights.shape[1] // 3] * 3
    q, k, v = (heads_of(part, num_heads) for part in np.split(every, np.cumsum(widths)[:-1], -1))
    if past is not None:
        k, v = np.concatenate([past[0], k], 2), np.concatenate([past[1], v], 2)
    total, rows = k.shape[2], q.shape[2]
    batch = x.shape[0]
    if mask_index is not None and mask_index.ndim == 1 and mask_index.size == 2 * batch:
        places = np.arange(total)[None]
        mask_index = (places < mask_index[:batch, None]) & (places >= mask_index[batch:, None])
    masks = _mask(mask_index, total, mask_filter_value)
    if unidirectional:
        masks = np.where(_later(rows, total), _NEVER, masks)
    scores = _scores(q, k, scale) + masks
    if attention_bias is not None:
        scores = scores + attention_bias
    present = np.stack([k, v]) if k.shape == v.shape else k
    return typed(rows_of(probabilities(scores) @ v), x), typed(present, x)


KERNELS = [
    microsoft("RotaryEmbedding", rotary_embedding),
    microsoft("MultiHeadAttention", multi_head_attention),
    microsoft("Attention", attention),
]
