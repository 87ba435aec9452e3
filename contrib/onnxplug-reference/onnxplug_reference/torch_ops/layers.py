"""Recurrent layers and attention by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onnxplug_reference.kernels import Kernel

#: ONNX's order of the gates, as places in PyTorch's: input, output, forget, cell; update, reset, hidden.
_ORDERS = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}
_PLAIN: dict[str, tuple[tuple[str, ...], ...]] = {
    "LSTM": (("sigmoid", "tanh", "tanh"),),
    "GRU": (("sigmoid", "tanh"),),
    "RNN": (("tanh",), ("relu",)),
}


def _names(op: str, activations: Sequence[str] | None, directions: int) -> tuple[str, ...]:
    """The activations of a direction, where all directions have the same and PyTorch has them.

    Raises:
        NotImplementedError: It has not.
    """
    each = len(_PLAIN[op][0])
    found = [name.lower() for name in activations or _PLAIN[op][0] * directions][: each * directions]
    names = tuple(found[:each])
    if any(tuple(found[i : i + each]) != names for i in range(0, len(found), each)) or names not in _PLAIN[op]:
        raise NotImplementedError("other activations are computed in NumPy")
    return names


def _layer(
    op: str,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    states: Sequence[Tensor | None],
    direction: str,
    layout: int,
    function: Callable[..., Any],
) -> tuple[Tensor, ...]:
    """Runs a layer by PyTorch: weights in its order of gates, the reverse direction by a reversed input."""
    directions, hidden = w.shape[0], r.shape[-1]
    if layout:
        x, states = x.transpose(0, 1), [s if s is None else s.transpose(0, 1) for s in states]
    order = _ORDERS[op]

    def gates(matrix: Tensor) -> Tensor:
        return torch.cat([matrix.split(hidden)[i] for i in order])

    parameters = []
    for d in range(directions):
        both = torch.zeros(2 * len(order) * hidden, dtype=x.dtype, device=x.device) if b is None else b[d]
        parameters += [gates(w[d]), gates(r[d]), *(gates(half) for half in both.chunk(2))]
    zeros = torch.zeros(directions, x.shape[1], hidden, dtype=x.dtype, device=x.device)
    initial = [zeros if s is None else s for s in states]
    backwards = direction == "reverse"
    first: Any = tuple(initial) if len(initial) > 1 else initial[0]
    every, *last = function(
        x.flip(0) if backwards else x, first, parameters, True, 1, 0.0, False, direction == "bidirectional", False
    )
    every = (every.flip(0) if backwards else every).unflatten(-1, (directions, hidden)).transpose(1, 2)
    if layout:
        return every.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last)
    return every, *last


def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    """An LSTM layer of sequences of one length, without peepholes."""
    if sequence_lens is not None or p is not None or clip or input_forget:
        raise NotImplementedError("lengths, peepholes, clipping and coupled gates are computed in NumPy")
    _names("LSTM", activations, w.shape[0])
    return _layer("LSTM", x, w, r, b, [initial_h, initial_c], direction, layout, torch.lstm)


def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    """A GRU layer of sequences of one length, whose reset gate comes after the linear map, as PyTorch has it."""
    if sequence_lens is not None or clip or not linear_before_reset:
        raise NotImplementedError("lengths, clipping and an early reset gate are computed in NumPy")
    _names("GRU", activations, w.shape[0])
    return _layer("GRU", x, w, r, b, [initial_h], direction, layout, torch.gru)


def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    """A layer with tanh or relu of sequences of one length."""
    if sequence_lens is not None or clip:
        raise NotImplementedError("lengths and clipping are computed in NumPy")
    (name,) = _names("RNN", activations, w.shape[0])
    return _layer(
        "RNN", x, w, r, b, [initial_h], direction, layout, torch.rnn_tanh if name == "tanh" else torch.rnn_relu
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    outputs: int,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Tensor, ...]:
    """Attention of heads by ``scaled_dot_product_attention``."""
    if softcap or outputs > 3 or (mask is not None and mask.dtype == torch.bool) or q.dtype == torch.float16:
        raise NotImplementedError("softcap, scores, float16, and masks that may hide a whole row are computed in NumPy")
    flat = q.dim() == 3
    if flat:
        heads = (q_num_heads, kv_num_heads, kv_num_heads)
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), heads, strict=True))
    rows, before = q.shape[2], 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    if mask is not None and (mask.shape[-1] != k.shape[2] or torch.isneginf(mask).any()):
        raise NotImplementedError("masks that may hide a whole row are computed in NumPy")
    if is_causal:
        if rows > k.shape[2] - before:
            raise NotImplementedError("rows without keys are computed in NumPy")
        later = torch.ones(rows, k.shape[2], dtype=torch.bool, device=q.device).triu(1 + before)
        hidden = torch.zeros(rows, k.shape[2], dtype=q.dtype, device=q.device).masked_fill(later, -torch.inf)
        mask = hidden if mask is None else mask + hidden
    result = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return (result.transpose(1, 2).flatten(2) if flat else result), k, v


def group_query_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    seqlens_k: Any = None,
    total_sequence_length: Any = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    local_window_size: int = -1,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Attention of groups of heads with a cache, each row of the batch by ``scaled_dot_product_attention``."""
    size = query.shape[-1] // (num_heads if key is not None else num_heads + 2 * kv_num_heads)
    if key is None or value is None:
        query, key, value = query.split([num_heads * size, kv_num_heads * size, kv_num_heads * size], -1)
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (query, key, value))
    rows, longest = q.shape[2], int(total_sequence_length)
    width = max(longest, past_key.shape[2] if past_key is not None else 0)
    results, caches = [], []
    for row, last in enumerate(seqlens_k.reshape(-1).tolist()):
        before = 0 if longest == rows else last + 1 - rows
        parts = []
        for past, new in ((past_key, k), (past_value, v)):
            old = new[row, :, :0] if past is None else past[row, :, :before]
            parts.append(torch.cat([old, new[row]], 1))
        own = before + torch.arange(rows, device=q.device)[:, None]
        places = torch.arange(parts[0].shape[1], device=q.device)[None]
        seen = places <= own if causal else torch.ones_like(places <= own)
        if causal and local_window_size > 0:
            seen = seen & (places > own - local_window_size)
        own_keys, own_values = parts
        found = F.scaled_dot_product_attention(q[row], own_keys, own_values, seen, scale=scale or None, enable_gqa=True)
        results.append(found)
        caches.append([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])
    keys, values = (torch.stack(column) for column in zip(*caches, strict=True))
    return torch.stack(results).transpose(1, 2).flatten(2), keys, values


KERNELS = [
    Kernel("Attention", attention, since=23),
    Kernel("GRU", gru, since=7),
    Kernel("LSTM", lstm, since=7),
    Kernel("RNN", rnn, since=7),
    Kernel("GroupQueryAttention", group_query_attention, domain="com.microsoft"),
]
