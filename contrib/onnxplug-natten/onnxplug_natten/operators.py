"""natten's operators in programs that were captured on a GPU without this package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onnxplug_natten.attention import attend, neighbors, packed, seen_under_a_causal_mask


def neighborhood(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    is_causal: Sequence[bool],
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """``natten::na1d_forward``, ``na2d_forward`` and ``na3d_forward``: results and logarithms of the sums.

    Args:
        query: [batch, sizes…, heads, D]
        key: As ``query``.
        value: [batch, sizes…, heads, V]
        kernel_size, stride, dilation, is_causal: A value for each axis.
        scale: The factor of the scores.
        _: Sizes of tiles.
    """
    out, total = neighbors(query, key, value, (kernel_size, stride, dilation, is_causal), scale, None, None)
    return out.to(query.dtype), total


def dense(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, *more: object
) -> tuple[Tensor, Tensor]:
    """``natten::fmha_forward``, ``hopper_fmha_forward`` and ``blackwell_fmha_forward``.

    Args:
        query: [batch, queries, heads, D]
        key: [batch, keys, heads, D]
        value: [batch, keys, heads, V]
        is_causal: Whether a query sees no key behind its own number.
        scale: The factor of the scores.
        more: Sizes of tiles, and a schedule where the operator has one; last, the ends of packed sequences of queries
            and of keys with a 0 in front, or ``None``, and their greatest lengths.
    """
    ends, ends_of_keys = more[-4:-2]
    if isinstance(ends, Tensor) and isinstance(ends_of_keys, Tensor):
        out, total = packed(query, key, value, ends.long(), ends_of_keys.long(), is_causal, scale)
        total = torch.where((torch.arange(query.shape[1], device=query.device) < ends[-1])[:, None], total, 0.0)
    else:
        seen = seen_under_a_causal_mask(query.shape[1], key.shape[1], query.device) if is_causal else None
        out, total = attend(query, key.unsqueeze(1), value.unsqueeze(1), seen, scale, None, None)
    return out.to(query.dtype), total
