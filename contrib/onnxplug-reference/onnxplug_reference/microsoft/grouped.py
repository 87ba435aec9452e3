"""GroupQueryAttention of com.microsoft."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import microsoft
from onnxplug_reference.microsoft.attention import heads_of, probabilities, rotated, rows_of
from onnxplug_reference.numeric import typed


class _Options(NamedTuple):
    """The options of the probabilities.

    Attributes:
        softcap: Scores become softcap tanh(scores / softcap), unless it is 0.
        window: The number of keys that a query sees under a causal mask, its own key the last; all unless it is
            positive.
        sink: [heads, 1, 1], summands of the softmax's sums; ``None`` without sinks.
    """

    scale: float
    softcap: float
    causal: bool
    window: int
    sink: np.ndarray | None


def group_query_attention(
    query: np.ndarray,
    key: np.ndarray | None = None,
    value: np.ndarray | None = None,
    past_key: np.ndarray | None = None,
    past_value: np.ndarray | None = None,
    seqlens_k: Any = None,
    total_sequence_length: Any = None,
    cos_cache: np.ndarray | None = None,
    sin_cache: np.ndarray | None = None,
    position_ids: np.ndarray | None = None,
    attention_bias: np.ndarray | None = None,
    head_sink: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    q_norm_weight: np.ndarray | None = None,
    k_norm_weight: np.ndarray | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> tuple[np.ndarray | None, ...]:
    """Attention of groups of heads that share keys, with a cache of keys and values.

    Args:
        query: [batch, sequence, heads * size], with keys and values appended when ``key`` is absent.
        key, value: [batch, sequence, groups * size].
        past_key, past_value: [batch, groups, past, size].
        seqlens_k: [batch], the number of keys of each row of the batch, new keys included, less 1.
        cos_cache, sin_cache: [positions, pairs] for ``do_rotary``.
        attention_bias: [batch or 1, heads or 1, sequence, keys].
        head_sink: [heads].

    Returns:
        [batch, sequence, heads * size]; the caches of keys and values with the new rows; with ``qk_output`` scores or
        probabilities.
    """
    if sliding_window_cache or "NONE" not in k_quant_type or "NONE" not in v_quant_type or k_scale is not None:
        raise EvaluationError("quantised and window-sized caches are ONNX Runtime's alone")
    q, k, v = _split(query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (_root_mean_square(p, w, qk_norm_epsilon) for p, w in ((q, q_norm_weight), (k, k_norm_weight)))
    batch, _, rows, size = q.shape
    totals = np.asarray(seqlens_k).reshape(-1).astype(np.int64) + 1
    longest = int(np.asarray(total_sequence_length).reshape(()))
    before = np.zeros(batch, np.int64) if longest == rows else totals - rows
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise EvaluationError("do_rotary needs cos_cache and sin_cache")
        places = before[:, None] + np.arange(rows)[None] if position_ids is None else position_ids
        cos, sin = cos_cache[places], sin_cache[places]
        q, k = (rotated(part, cos, sin, bool(rotary_interleaved)) for part in (q, k))
    width = longest if past_key is None else max(longest, past_key.shape[2])
    keys, values = (_cached(p, new, before, width) for p, new in ((past_key, k), (past_value, v)))
    sink = None
    if head_sink is not None:
        sink = head_sink.astype(np.float64).reshape(-1, 1, 1)
    elif smooth_softmax == 1:
        sink = np.zeros((num_heads, 1, 1))
    options = _Options(scale or 1 / np.sqrt(size), softcap, bool(causal), local_window_size, sink)
    results, weights = _all_rows(q, keys, values, attention_bias, totals, before, options, qk_output)
    scores = typed(weights, query) if qk_output else None
    return typed(rows_of(results), query), typed(keys, query), typed(values, query), scores


def _all_rows(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    bias: np.ndarray | None,
    totals: np.ndarray,
    before: np.ndarray,
    options: _Options,
    qk_output: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The attention of each batch row to its own keys, [batch, heads, sequence, size], and scores or probabilities."""
    results, weights = [], []
    group = q.shape[1] // keys.shape[1]
    for row in range(q.shape[0]):
        added = None if bias is None else bias[row if bias.shape[0] > 1 else 0]
        seen = slice(0, max(int(totals[row]), int(before[row]) + q.shape[2]))
        row_keys, row_values = (np.repeat(c[row, :, seen], group, 0) for c in (keys, values))
        result, scores = _attended(q[row], row_keys, row_values, added, int(before[row]), options, qk_output)
        results.append(result)
        weights.append(np.pad(scores, ((0, 0), (0, 0), (0, keys.shape[2] - scores.shape[-1]))))
    return np.stack(results), np.stack(weights)


def _split(
    query: np.ndarray, key: np.ndarray | None, value: np.ndarray | None, heads: int, groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if key is not None and value is not None:
        return heads_of(query, heads), heads_of(key, groups), heads_of(value, groups)
    size = query.shape[-1] // (heads + 2 * groups)
    q, k, v = np.split(query, [heads * size, (heads + groups) * size], -1)
    return heads_of(q, heads), heads_of(k, groups), heads_of(v, groups)


def _root_mean_square(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _cached(past: np.ndarray | None, new: np.ndarray, before: np.ndarray, width: int) -> np.ndarray:
    """The cache with the new keys after each row's old keys, and zeros after them."""
    batch, groups, rows, size = new.shape
    result = np.zeros((batch, groups, max(width, int(before.max()) + rows), size), new.dtype)
    for row in range(batch):
        start = int(before[row])
        if past is not None:
            result[row, :, :start] = past[row, :, :start]
        result[row, :, start : start + rows] = new[row]
    return result[:, :, :width] if result.shape[2] > width else result


def _attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    bias: np.ndarray | None,
    before: int,
    options: _Options,
    qk_output: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Results, and scores or probabilities, of one row of the batch: [heads, sequence, size or keys]."""
    scores = (q @ k.swapaxes(-1, -2)).astype(np.float64) * options.scale
    if options.softcap:
        scores = options.softcap * np.tanh(scores / options.softcap)
    if bias is not None:
        scores = scores + bias[:, :, : scores.shape[-1]]
    places, own = np.arange(k.shape[1])[None], before + np.arange(q.shape[1])[:, None]
    hidden = places > own if options.causal else np.zeros((1, 1), bool)
    if options.causal and options.window > 0:
        hidden = hidden | (places <= own - options.window)
    masked = np.where(hidden, -np.inf, scores)
    weights = probabilities(masked, options.sink)
    return weights @ v, weights if qk_output == 2 else np.where(hidden, 0, scores)


KERNELS = [microsoft("GroupQueryAttention", group_query_attention)]
