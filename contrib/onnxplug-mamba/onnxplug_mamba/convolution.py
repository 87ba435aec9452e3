"""causal_conv1d's two operators by ATen operators: the functions return the new values of the written arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    out: Tensor,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> tuple[Tensor, ...]:
    """``_causal_conv1d_fwd_cpp``: a convolution of each channel that sees no later token, computed in float32.

    Args:
        x: [batch, channels, L]
        weight: [channels, width]
        bias: [channels]
        seq_idx: [batch, L], the sequence of each token: it sees no other sequence, and is 0 where its number is
            negative.
        initial_states: [batch, channels, width - 1], the tokens before the first; zeros by default.
        out: [batch, channels, L], whose dtype the result has.
        final_states_out: [batch, channels, width - 1] or ``None``.
        silu_activation: Whether the result passes through SiLU.

    Returns:
        The new value of ``out``, and of ``final_states_out`` where it isn't ``None``.
    """
    length, before = x.shape[2], weight.shape[1] - 1
    joined = functional.pad(x, (before, 0)) if initial_states is None else torch.cat([initial_states, x], -1)
    if seq_idx is None:
        result = _convolved(joined, weight, bias)
    else:
        first = seq_idx.new_full((x.shape[0], 1), -1) if initial_states is None else seq_idx[:, :1]
        sequences = torch.cat([first.expand(-1, before), seq_idx], 1)
        result = _of_sequences(joined, weight, bias, sequences, length)
    result = functional.silu(result) if silu_activation else result
    if final_states_out is None:
        return (result.to(out.dtype),)
    return result.to(out.dtype), joined.narrow(2, length, before).to(final_states_out.dtype, copy=True)


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``_causal_conv1d_update_cpp``: the convolution of new tokens, with the tokens before them in the state.

    Args:
        x: [batch, channels, L]
        conv_state: [batch or more, channels, size]
        weight: [channels, width]
        bias: [channels]
        out: [batch, channels, L]
        silu_activation: Whether the result passes through SiLU.
        cache_seqlens: [batch], the number of earlier tokens; the state is then a ring that the new tokens are written
            to.
        conv_state_indices: [batch], the state of each element; an element with a negative index is 0, and writes no
            state.

    Returns:
        The new values of ``conv_state`` and ``out``.
    """
    length, size, before = x.shape[2], conv_state.shape[2], weight.shape[1] - 1
    state = conv_state if conv_state_indices is None else conv_state[conv_state_indices.long().clamp(min=0)]
    if cache_seqlens is None:
        joined = torch.cat([state, x.to(state.dtype)], 2)
        last, seen = joined.narrow(2, length, size), joined.narrow(2, size - before, length + before)
    else:
        used = cache_seqlens.long()[:, None]
        places = torch.remainder(used + torch.arange(-before, 0, device=x.device), size)
        seen = torch.cat([_at(state, places), x.to(state.dtype)], 2)
        last = _in_ring(state, x.to(state.dtype), used)
    result = _convolved(seen, weight, bias)
    result = functional.silu(result) if silu_activation else result
    if conv_state_indices is not None:
        result = torch.where(conv_state_indices[:, None, None] < 0, 0.0, result)
        last = with_rows(conv_state, conv_state_indices, last)
    return last.clone(), result.to(out.dtype)


def with_rows(states: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """The states with new rows where indices name them; a negative index writes no row."""
    count = states.shape[0]
    places = torch.where(indices < 0, count, indices.long())
    return torch.cat([states, states.narrow(0, 0, 1)]).index_put((places,), rows).narrow(0, 0, count)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.float()
    return functional.conv1d(x.float(), weight.float().unsqueeze(1), bias, groups=weight.shape[0])


def _of_sequences(x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor, length: Any) -> Tensor:
    """The convolution within sequences, tap by tap, as the visible taps depend on the token."""
    width = weight.shape[1]
    own = sequences.narrow(1, width - 1, length)
    result: Any = 0.0 if bias is None else bias.float().unsqueeze(1)
    for tap in range(width):
        seen = (sequences.narrow(1, tap, length) == own).unsqueeze(1)
        result = result + torch.where(seen, x.narrow(2, tap, length).float(), 0.0) * weight[:, tap, None].float()
    return torch.where(own.unsqueeze(1) < 0, 0.0, result)


def _at(state: Tensor, places: Tensor) -> Tensor:
    """Columns of a state, [batch, channels, count], by places [batch, count]."""
    return state.gather(2, places.unsqueeze(1).expand(-1, state.shape[1], -1))


def _in_ring(state: Tensor, x: Tensor, used: Tensor) -> Tensor:
    """The ring with the new tokens: each place has the last token written to it, or keeps its value."""
    size, length = state.shape[2], x.shape[2]
    places = torch.arange(size, device=x.device)
    token = length - 1 - torch.remainder(used + (length - 1) - places, size)
    return torch.where(token.unsqueeze(1) < 0, state, _at(x, token.clamp(min=0)))
