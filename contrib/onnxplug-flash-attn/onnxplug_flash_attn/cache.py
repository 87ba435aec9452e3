"""Attention with a cache that new keys and values are written to: flash_attn's extension function ``fwd_kvcache``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug_flash_attn.attention import Lengths, Terms, attend
from onnxplug_flash_attn.grouped import written


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Any,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """The result [batch, L, heads, E] and the logarithms [batch, heads, L]; the arguments are in the extension's order.

    ``k`` and ``v`` are written into the caches behind the first ``cache_seqlens`` rows. The caches are [batch, size, heads, E], or
    pages, [pages, size, heads, E], that ``block_table`` [batch, count] names.
    """
    batch, rows = q.shape[:2]
    used = cache_seqlens
    if used is not None and not isinstance(used, Tensor):
        used = torch.full((batch,), used, dtype=torch.int64, device=q.device)
    size = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    right = 0 if causal else window_size_right
    terms = Terms.of(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, reach=size)
    if k is not None and v is not None:
        used = used.long()
        if rotary_cos is not None and rotary_sin is not None:
            moving = terms.left >= 0 or right >= 0
            numbers = torch.arange(rows, device=q.device) * int(moving)
            q = _rotated(q, rotary_cos, rotary_sin, used.unsqueeze(1) + numbers, rotary_interleaved)
        places = used.unsqueeze(1) + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            k = _rotated(k, rotary_cos, rotary_sin, places, rotary_interleaved)
        where = _written(places, k_cache, cache_batch_idx, block_table)
        k_cache.index_put_(where, k)
        v_cache.index_put_(where, v)
        used = used + k.shape[1]
    keys, values = (_read(x, batch, cache_batch_idx, block_table) for x in (k_cache, v_cache))
    result, logarithms = attend(q, keys, values, terms, Lengths(None, used, cache_leftpad))
    plain = cache_batch_idx is None and cache_leftpad is None and block_table is None
    if plain and k is not None and v is not None and torch.compiler.is_exporting() and _is_grouped(q, k, v, terms):
        result = written(q, k, v, keys, values, used, softmax_scale, terms.left, softcap)
    return result, logarithms


def _is_grouped(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> bool:
    """Whether GroupQueryAttention computes a call.

    It takes causal attention of as many new keys as queries, to one query or one element of the batch.
    """
    one = statically_known_true(q.shape[1] == 1)
    causal = terms.right == 0 or (one and terms.right < 0)
    rows, sizes = statically_known_true(q.shape[1] == k.shape[1]), q.shape[3] % 8 == 0 and k.shape[3] == v.shape[3]
    alone = one or statically_known_true(q.shape[0] == 1)
    return causal and rows and sizes and alone and terms.slopes is None and terms.scale != 0


def _written(places: Tensor, cache: Tensor, chosen: Tensor | None, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The index of each new row in the cache."""
    if table is not None:
        size = cache.shape[1]
        return table.long().gather(1, places // size), places % size
    first = torch.arange(places.shape[0], device=places.device) if chosen is None else chosen.long()
    return first.unsqueeze(1), places


def _read(cache: Tensor, batch: Any, chosen: Tensor | None, table: Tensor | None) -> Tensor:
    """The cache of each element of the batch, [batch, size, heads, E]."""
    if table is not None:
        return cache[table.long()].flatten(1, 2)
    if chosen is not None:
        return cache[chosen.long()]
    return cache if statically_known_true(cache.shape[0] == batch) else cache.narrow(0, 0, batch)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """Rotary embeddings of the places [batch, L], in float32; pairs are neighbouring elements, or the two halves."""
    width = 2 * cos.shape[1]
    cos, sin = (t[places].unsqueeze(2).float() for t in (cos, sin))
    turned, rest = x[..., :width].float(), x[..., width:]
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    both = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
