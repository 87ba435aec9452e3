"""Attention as flash_attn's kernels compute it, by ATen operators of any sizes.

Queries are [batch, L, heads, E], keys and values [batch, S, heads or a divisor, E]. Query i stands at the place ``i + S - L`` among
the keys: masks end in the lower right corner. A row without a visible key is 0, and its logarithm is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional


@dataclass(frozen=True)
class Terms:
    """The terms of the scores and the bounds of the window.

    Attributes:
        scale: The factor of the scores.
        left, right: How many keys before and after its own place a query sees; negative for all.
        softcap: The bound of the scores by a tanh, 0 for none.
        slopes: [heads] or [batch, heads], the decrease of the scores per distance of a key (ALiBi).
        reach: The number of keys for which the kernel is launched: a side of the window with as many keys is unbounded.
    """

    scale: float
    left: int
    right: int
    softcap: float
    slopes: Tensor | None
    reach: Any

    @classmethod
    def of(
        cls, scale: float, causal: bool, left: int, right: int, softcap: float, slopes: Tensor | None, reach: Any
    ) -> Terms:
        """The terms of an operator's arguments."""
        right = 0 if causal else -1 if statically_known_true(right >= reach) else right
        return cls(scale, -1 if statically_known_true(left >= reach) else left, right, softcap, slopes, reach)


@dataclass(frozen=True)
class Lengths:
    """The numbers of queries and keys of each element of the batch, and its first key: [batch]; ``None`` for all."""

    queries: Tensor | None = None
    keys: Tensor | None = None
    first_key: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, terms: Terms, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """The result, [batch, L, heads, E], and the logarithms of the sums of exponentials, [batch, heads, L] in float32."""
    places = _places(query, key, lengths)
    visible = _visible(query, key, terms, lengths, places)
    scores = _scores(query, key, terms, places)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    total = _log_of_sum(scores)
    if terms.slopes is not None and terms.right == 0:
        total = total + _left_out(terms, places, lengths, key.shape[2])
    total = total.permute(0, 3, 1, 2).flatten(2, 3).transpose(1, 2)
    # PyTorch's attention compares sizes with 0, which fails for packed sequences, whose sizes are known at run time
    # alone.
    if terms.softcap or terms.slopes is not None or lengths.queries is not None:
        weights = scores.softmax(-1)
        weights = weights if visible is None else weights.masked_fill(~visible, 0.0)
        result = weights.to(value.dtype) @ value.transpose(1, 2).unsqueeze(2)
        return result.permute(0, 3, 1, 2, 4).flatten(2, 3), total
    if visible is not None and visible.dim() == 5:
        visible = visible.squeeze(1)
    is_causal = _is_plainly_causal(query, key, terms, lengths)
    result = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if is_causal else visible,
        is_causal=is_causal,
        scale=terms.scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return result.transpose(1, 2), total


def _is_plainly_causal(query: Tensor, key: Tensor, terms: Terms, lengths: Lengths) -> bool:
    same = statically_known_true(query.shape[1] == key.shape[1])
    return same and terms.right == 0 and terms.left < 0 and lengths == Lengths()


def _places(query: Tensor, key: Tensor, lengths: Lengths) -> Tensor:
    """Where each query stands among the keys: [L, 1] or [batch, 1, 1, L, 1]."""
    rows = torch.arange(query.shape[1], device=query.device).unsqueeze(1)
    if lengths.queries is None and lengths.keys is None:
        return rows + (key.shape[1] - query.shape[1])
    keys = key.shape[1] if lengths.keys is None else _of_batch(lengths.keys)
    return rows + (keys - (query.shape[1] if lengths.queries is None else _of_batch(lengths.queries)))


def _of_batch(x: Tensor) -> Tensor:
    """[batch] as [batch, 1, 1, 1, 1]."""
    return x.long()[:, None, None, None, None]


def _visible(query: Tensor, key: Tensor, terms: Terms, lengths: Lengths, places: Tensor) -> Tensor | None:
    """Which query sees which key, [L, S] or [batch, 1, 1, L, S]; ``None`` for all."""
    columns = torch.arange(key.shape[1], device=query.device)
    right, conditions = terms.right, []
    if right == 0 and lengths == Lengths() and statically_known_true(query.shape[1] == 1):
        right = -1  # the single query stands at the last key
    if right >= 0:
        if right > 0 and not isinstance(terms.reach, int):  # unbounded where the window is as long as the keys
            right = right + torch.sym_max(0, right + 1 - terms.reach) * (key.shape[1] + query.shape[1])
        conditions.append(columns <= places + right)
    if terms.left >= 0:
        conditions.append(columns >= places - terms.left)
    if lengths.keys is not None:
        conditions.append(columns < _of_batch(lengths.keys))
    if lengths.first_key is not None:
        conditions.append(columns >= _of_batch(lengths.first_key))
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = visible & condition
    return visible


def _log_of_sum(scores: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials along the last axis, infinite where no score is visible."""
    top = torch.cat([scores, scores.new_full((*scores.shape[:-1], 1), -math.inf)], -1).amax(-1)
    hidden = top == -math.inf
    top = top.masked_fill(hidden, 0.0)
    return ((scores - top.unsqueeze(-1)).exp().sum(-1).log() + top).masked_fill(hidden, math.inf)


def _scores(query: Tensor, key: Tensor, terms: Terms, places: Tensor) -> Tensor:
    """The scores without masks, [batch, heads of keys, queries' heads for each, L, S] in float32."""
    heads = key.shape[2]
    rows = query.float().unflatten(2, (heads, query.shape[2] // heads)).permute(0, 2, 3, 1, 4)
    scores = (rows * terms.scale) @ key.float().permute(0, 2, 3, 1).unsqueeze(2)
    if terms.softcap:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if terms.slopes is not None:
        distance = (places - torch.arange(key.shape[1], device=query.device)).abs()
        scores = scores - _of_heads(terms.slopes, heads) * distance
    return scores


def _of_heads(slopes: Tensor, heads: int) -> Tensor:
    """[heads] or [batch, heads] as [batch or 1, heads of keys, queries' heads for each, 1, 1]."""
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    return slopes.float().unflatten(1, (heads, slopes.shape[1] // heads))[..., None, None]


def _left_out(terms: Terms, places: Tensor, lengths: Lengths, heads: int) -> Tensor:
    """The summand of logarithms under a causal mask: the kernel adds ``slope * key``, not ``-slope * distance``."""
    assert terms.slopes is not None
    before = places if lengths.first_key is None else places - _of_batch(lengths.first_key)
    shift = _of_heads(terms.slopes, heads) * before
    if terms.left >= 0:  # the kernel counts a window without an end as causal
        shift = shift * (torch.full((), terms.reach, device=shift.device) <= terms.left)
    return shift.squeeze(-1)
