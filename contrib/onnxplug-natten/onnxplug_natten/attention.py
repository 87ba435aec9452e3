"""Neighbourhood attention by ATen operators: the keys of each query's window are gathered, never all queries times all keys."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from onnxplug import UsageError


def neighborhood_attention_generic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Any,
    stride: Any = 1,
    dilation: Any = 1,
    is_causal: Any = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Any = None,
    kv_tile_shape: Any = None,
    backward_q_tile_shape: Any = None,
    backward_kv_tile_shape: Any = None,
    backward_kv_splits: Any = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Any:
    """natten's function of that name, which ``na1d``, ``na2d``, ``na3d`` and its modules call, in float32.

    Args:
        query: [batch, sizes…, heads, D]
        key: [batch, sizes…, heads that queries share, D]
        value: [batch, sizes…, heads that queries share, V]
        kernel_size, stride, dilation, is_causal: A value for each axis, or one for all.
        scale: The factor of the scores.
        additional_keys: [batch, keys, heads that queries share, D], seen by every query.
        additional_values: [batch, keys, heads that queries share, V]
        attention_kwargs, backend, and the arguments up to ``torch_compile``: Settings of kernels, which change no
            result.
        return_lse: Whether the logarithms of the sums of exponentials are returned, too.

    Returns:
        [batch, sizes…, heads, V]; with ``return_lse`` also the logarithms [batch, sizes…, heads].
    """
    checks = sys.modules["natten.utils.checks"]
    checks.na_tensor_checks(query, key, value)
    checks.additional_kv_tensor_checks(query, key, value, additional_keys, additional_values)
    axes = query.dim() - 3
    given = dict(
        zip(
            ("kernel_size", "stride", "dilation", "is_causal"),
            checks.check_all_args(axes, kernel_size, stride, dilation, is_causal),
            strict=True,
        )
    )
    checks.check_args_against_input(query, **given)
    out, total = neighbors(query, key, value, tuple(given.values()), scale, additional_keys, additional_values)
    out = out.to(value.dtype)
    return (out, total) if return_lse else out


def neighbors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: tuple[Any, Any, Any, Any],
    scale: float | None,
    more: Tensor | None,
    last: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Results [batch, sizes…, heads, V] and logarithms of the sums [batch, sizes…, heads], in float32.

    ``window`` is the kernel's size, stride, dilation and whether it is causal, each a value for every axis.
    """
    axes = query.dim() - 3
    sizes = query.shape[1 : 1 + axes]
    places, seen = _windows(sizes, query.device, *window)
    keys, values = (x.flatten(1, axes)[:, places] for x in (key, value))  # [batch, queries, window, heads, width]
    out, total = attend(query.flatten(1, axes), keys, values, seen, scale, more, last)
    return out.unflatten(1, sizes), total.unflatten(1, sizes)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    seqlens_Q: Tensor | None = None,
    seqlens_KV: Tensor | None = None,
    cumulative_seqlen_Q: Tensor | None = None,
    cumulative_seqlen_KV: Tensor | None = None,
    max_seqlen_Q: int | None = None,
    max_seqlen_KV: int | None = None,
    backend: str | None = None,
    q_tile_size: int | None = None,
    kv_tile_size: int | None = None,
    backward_q_tile_size: int | None = None,
    backward_kv_tile_size: int | None = None,
    backward_kv_splits: int | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Any:
    """natten's plain attention, in float32.

    Args:
        query: [batch, queries, heads, D]
        key: [batch, keys, heads that queries share, D]
        value: [batch, keys, heads that queries share, V]
        is_causal: Whether a query sees no key behind its own number: the mask begins in the upper left corner of each
            sequence.
        scale: The factor of the scores.
        seqlens_Q, seqlens_KV: The lengths of sequences one after the other; the batch is 1 then.
        cumulative_seqlen_Q, cumulative_seqlen_KV: The ends of the sequences, with a 0 in front, instead of the lengths.
        max_seqlen_Q, and the arguments up to ``torch_compile``: Settings of kernels, which change no result.
        return_lse: Whether the logarithms of the sums of exponentials are returned, too.
    """
    sys.modules["natten.utils.checks"].fmha_tensor_checks(query, key, value)
    ends = _ends(seqlens_Q, cumulative_seqlen_Q), _ends(seqlens_KV, cumulative_seqlen_KV)
    if ends[0] is not None and ends[1] is not None:
        out, total = packed(query, key, value, ends[0], ends[1], is_causal, scale)
    elif ends != (None, None):
        raise UsageError("natten's attention needs the lengths of queries and of keys, or neither")
    else:
        seen = seen_under_a_causal_mask(query.shape[1], key.shape[1], query.device) if is_causal else None
        out, total = attend(query, key.unsqueeze(1), value.unsqueeze(1), seen, scale, None, None)
    out = out.to(value.dtype)
    return (out, total) if return_lse else out


def merge_attentions(
    outputs: list[Tensor], lse_tensors: list[Tensor], torch_compile: bool = True, use_autograd_fix: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention to several sets of keys, [batch, queries, heads, V], and logarithms, from the attention to each set."""
    totals = torch.stack([x.float() for x in lse_tensors], -1)
    merged = (torch.stack([x.float() for x in outputs], -1) * totals.softmax(-1).unsqueeze(-2)).sum(-1)
    return merged.to(outputs[0].dtype), totals.logsumexp(-1)


def _ends(lengths: Tensor | None, ends: Tensor | None) -> Tensor | None:
    """The ends of sequences, with a 0 in front; ``None`` without packed sequences."""
    if lengths is None:
        return None if ends is None else ends.long()
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()


def packed(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_of_keys: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention within sequences one after the other, padded to the longest at run time; rows behind them are 0."""
    if query.shape[0] != 1:
        raise UsageError(f"natten's attention of packed sequences takes a batch of 1, not of {query.shape[0]}")
    starts, lengths = ends[:-1], ends[1:] - ends[:-1]
    counts = ends_of_keys[1:] - ends_of_keys[:-1]
    rows, columns = _numbers(lengths), _numbers(counts)
    inside = columns < counts.unsqueeze(1)
    keys, values = (x[0][torch.where(inside, ends_of_keys[:-1, None] + columns, 0)] for x in (key, value))
    seen = inside.unsqueeze(1) & ((columns <= rows[:, None]) if is_causal else torch.ones_like(rows[:, None] > -1))
    padded = query[0][torch.where(rows < lengths.unsqueeze(1), starts.unsqueeze(1) + rows, 0)]
    out, total = attend(padded, keys.unsqueeze(1), values.unsqueeze(1), seen, scale, None, None)
    place = torch.arange(query.shape[1], device=query.device)
    sequence = (place.unsqueeze(1) >= ends[1:]).sum(1).clamp(max=lengths.shape[0] - 1)
    row = (place - starts[sequence]).clamp(max=rows.shape[0] - 1)
    out = out[sequence, row].masked_fill((place >= ends[-1])[:, None, None], 0.0)
    return out.unsqueeze(0), total[sequence, row].unsqueeze(0)


def _numbers(lengths: Tensor) -> Tensor:
    """The numbers below the largest length; at least the number 0, so that an index has an element to choose."""
    longest = lengths.max().clamp(min=1).item()
    torch._check(longest >= 1)
    return torch.arange(longest, device=lengths.device)


def seen_under_a_causal_mask(queries: Any, keys: Any, device: torch.device) -> Tensor:
    """The causal mask [queries, keys], True where a query sees a key."""
    return torch.arange(keys, device=device) <= torch.arange(queries, device=device).unsqueeze(1)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    scale: float | None,
    more: Tensor | None,
    last: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Results and logarithms of the attention of queries to the keys of their windows.

    Queries are [batch, queries, heads, D], keys [batch, queries or 1, window, shared heads, D]. The mask ``seen`` is
    [queries, window] or [batch, queries, window]; with the latter a query without a visible key has a result of 0.
    """
    shared = keys.shape[3]
    q = query.float().unflatten(2, (shared, -1)) * (scale or query.shape[-1] ** -0.5)
    scores = q @ keys.float().permute(0, 1, 3, 4, 2)  # [batch, queries, shared heads, group, window]
    if seen is not None:
        hidden = ~seen.unsqueeze(-2).unsqueeze(-2)
        scores = scores.masked_fill(hidden, float("-inf"))
    window = scores.shape[-1]
    if more is not None:
        scores = torch.cat([scores, q @ more.float().permute(0, 2, 3, 1).unsqueeze(1)], -1)
    parts = scores.softmax(-1)
    if seen is not None and seen.dim() == 3:
        parts = parts.masked_fill(hidden, 0.0)
    out = parts[..., :window] @ values.float().permute(0, 1, 3, 2, 4)
    if last is not None:
        out = out + parts[..., window:] @ last.float().transpose(1, 2).unsqueeze(1)
    return out.flatten(2, 3), scores.logsumexp(-1).flatten(2)


def _windows(
    sizes: Any, device: torch.device, kernels: Any, strides: Any, dilations: Any, causal: Any
) -> tuple[Tensor, Any]:
    """The keys of each query's window, [queries, window], and the mask of visible keys, ``None`` where all are."""
    places, seen = torch.zeros(1, 1, dtype=torch.int64, device=device), None
    for size, kernel, stride, dilation, is_causal in zip(sizes, kernels, strides, dilations, causal, strict=True):
        own, visible = _window(size, device, kernel, stride, dilation, is_causal)
        places = (places[:, None, :, None] * size + own[None, :, None, :]).flatten(2).flatten(0, 1)
        if seen is None and is_causal:
            seen = torch.ones((), dtype=torch.bool, device=device).expand(
                places.shape[0] // size, places.shape[1] // kernel
            )
        if seen is not None:
            seen = (seen[:, None, :, None] & visible[None, :, None, :]).flatten(2).flatten(0, 1)
    return places, seen


def _window(
    size: Any, device: torch.device, kernel: int, stride: int, dilation: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The places of each query's window along one axis, [size, kernel], and the mask of visible places.

    Places that are ``dilation`` apart are a group; ``stride`` queries of a group share the window of their leader.
    """
    place = torch.arange(size, device=device)
    group, own = place % dilation, place // dilation
    last = (size - 1 - group) // dilation
    leader = (own // stride * stride + (stride - 1 if causal else stride // 2)).minimum(last)
    if causal:
        first = leader - (kernel - 1)
    else:
        first = (leader - kernel // 2).clamp(min=0).minimum(last - (kernel - 1))
    window = first[:, None] + torch.arange(kernel, device=device)
    visible = (window >= 0) & (window <= own[:, None]) if causal else torch.ones_like(window, dtype=torch.bool)
    return window.clamp(min=0) * dilation + group[:, None], visible
