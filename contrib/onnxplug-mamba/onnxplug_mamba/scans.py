"""mamba_ssm's state spaces by ATen operators: loops over tokens or chunks of tokens, which become scans in a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug import Unsupported
from onnxplug.patches.scans import scanned
from onnxplug_mamba.convolution import with_rows

#: The number of tokens of Mamba-2 that are computed together; the result is the same for any number.
CHUNK = 64


def selective(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """``selective_scan_cuda.fwd``: ``h = exp(delta A) h + delta B u``, and the result ``C h + D u``, in float32.

    Args:
        u: [batch, channels, L]
        delta: [batch, channels, L]
        A: [channels, N]
        B: [batch, groups, N, L], or [channels, N] for all tokens.
        C: As B.
        D: [channels]
        z: [batch, channels, L], a gate of the results.
        delta_bias: [channels], added to ``delta``.
        delta_softplus: Whether ``delta`` passes through softplus.

    Returns:
        The result; [batch, channels, 1, 2 N], in turns the decay over all tokens and the last state; with a gate also
        the gated result.
    """
    if A.is_complex():
        raise Unsupported("mamba_ssm's selective scan of a complex A")
    groups = next((t.shape[1] for t in (B, C) if t.dim() == 4), 1)
    dt = _steps(delta.float(), delta_bias, delta_softplus)
    decay = A.float().unflatten(0, (groups, -1))

    def columns(x: Tensor) -> Tensor:
        """[L, batch, groups, channels of a group, 1]"""
        return x.unflatten(1, (groups, -1)).permute(3, 0, 1, 2).unsqueeze(-1)

    # B and C as [L, batch, groups, 1, N], where they differ from token to token.
    varying = [t.float().permute(3, 0, 1, 2).unsqueeze(-2) for t in (B, C) if t.dim() == 4]

    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        dt, added, *rest = token
        own = iter(rest)
        b, c = (next(own) if t.dim() == 4 else t.float().unflatten(0, (groups, -1)) for t in (B, C))
        state = torch.exp(dt * decay) * state + added * b
        return state, (state * c).sum(-1)

    first = torch.zeros((u.shape[0], *decay.shape), dtype=torch.float32, device=u.device)
    state, results = scanned(step, first, (columns(dt), columns(dt * u.float()), *varying))
    result = results.permute(1, 2, 3, 0).flatten(1, 2)
    if D is not None:
        result = result + D.float().unsqueeze(1) * u.float()
    whole = torch.exp(dt.sum(-1, keepdim=True) * A.float())
    last = torch.stack([whole, state.flatten(1, 2)], -1).flatten(2).unsqueeze(2)
    out = [result.to(delta.dtype), last]
    return out if z is None else [*out, (result * functional.silu(z.float())).to(delta.dtype)]


def chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor | None, ...]:
    """Mamba-2's ``_mamba_chunk_scan_combined_fwd``: ``h = exp(dt A) h + dt x Bᵀ``, and the result ``h C + D x``.

    A chunk of tokens is computed as attention with decaying scores, and the state is carried from chunk to chunk, all
    in float32.

    Args:
        x: [batch, L, heads, P]
        dt: [batch, L, heads]
        A: [heads]
        B: [batch, L, groups, N]
        C: [batch, L, groups, N]
        chunk_size: The library's size of a chunk; only the rounding of the result depends on it.
        D: [heads] or [heads, P]
        z: [batch, L, heads, P], a gate of the results.
        dt_bias: [heads], added to ``dt``.
        initial_states: [batch, heads, P, N], or zeros.
        seq_idx: [batch, L], the sequence of each token: sequences don't see one another.
        cu_seqlens: The ends of sequences, for the states there; refused.
        dt_softplus: Whether ``dt`` passes through softplus.
        dt_limit: Bounds of ``dt``.

    Returns:
        The result, the result before the gate, ``None`` three times for results that only gradients need, and the last
        state.
    """
    if cu_seqlens is not None:
        raise Unsupported("the states at the ends of packed sequences (cu_seqlens) of mamba_ssm")
    batch, length, heads, width = x.shape
    groups, size = B.shape[2], min(chunk_size, CHUNK)
    count = (length + size - 1) // size
    steps = _steps(dt.float().transpose(1, 2), dt_bias, dt_softplus).transpose(1, 2).clamp(*dt_limit)

    def chunks(t: Tensor) -> Tensor:
        """[count, batch, groups, heads of a group or 1, size, ...]; padding is 0, which neither decays nor adds."""
        t = functional.pad(t, (*(0 for _ in range(2 * t.dim() - 4)), 0, count * size - length))
        t = t.unflatten(2, (groups, -1)).unflatten(1, (count, size))
        return t.permute(1, 0, 3, 4, 2, *range(5, t.dim()))

    sequences = [chunks(t) for t in (steps.unsqueeze(-1) * x.float(), steps * A.float(), B.float(), C.float())]
    places = torch.arange(size, device=x.device)
    causal = places[:, None] >= places

    def step(carry: list[Tensor], tokens: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        (state, *sequence), (added, decays, keys, queries, *own) = carry, tokens
        since = decays.cumsum(-1)
        between = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~causal, -math.inf)
        read, left, kept = since.exp(), (since[..., -1:] - since).exp(), since[..., -1:].exp()
        for before, now in zip(sequence, own, strict=True):  # [batch, 1, 1, 1] and [batch, 1, 1, size]
            last = now[..., -1:]
            between = between.masked_fill(now.unsqueeze(-1) != now.unsqueeze(-2), -math.inf)
            read, left, kept = read * (now == before), left * (now == last), kept * (last == before)
        result = (queries @ keys.mT * between.exp()) @ added + read.unsqueeze(-1) * (queries @ state.mT)
        state = kept.unsqueeze(-1) * state + (added * left.unsqueeze(-1)).mT @ keys
        return [state, *(now[..., -1:].clone() for now in own)], result

    shape = (batch, groups, heads // groups, width, B.shape[3])
    first = [torch.zeros(shape, dtype=torch.float32, device=x.device)]
    if initial_states is not None:
        first = [initial_states.float().unflatten(1, (groups, -1)).clone()]
    if seq_idx is not None:
        torch._check(seq_idx.shape[1] == length)
        first.append(seq_idx.new_zeros((batch, 1, 1, 1)))
        rest = seq_idx[:, -1:].expand(-1, count * size - length)
        numbers = torch.cat([seq_idx, rest], 1).unflatten(1, (count, size)).transpose(0, 1)
        sequences.append(numbers[:, :, None, None])
    (state, *_), results = scanned(step, first, tuple(sequences))
    result = results.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
    result, _ = result.split([length, count * size - length], dim=1)
    if D is not None:
        result = result + (D if D.dim() == 2 else D.unsqueeze(1)).float() * x.float()
    plain = result.to(x.dtype)
    gated = plain if z is None else (result * functional.silu(z.float())).to(x.dtype)
    return gated, plain if z is not None else None, None, None, None, state.flatten(1, 2)


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """``selective_state_update``: one token of either state space, in float32; the state is written.

    Args:
        state: [batch or more, heads, P, N]; for Mamba-1 all arguments are without heads.
        x: [batch, heads, P]
        dt: [batch, heads, P]
        A: [heads, P, N]
        B: [batch, groups, N]
        C: [batch, groups, N]
        D: [heads, P]
        z: [batch, heads, P], a gate of the result.
        dt_bias: [heads, P]
        dt_softplus: Whether ``dt`` passes through softplus.
        state_batch_indices: [batch], the state of each element; an element with a negative index is 0, and writes no
            state.

    Returns:
        [batch, heads, P]
    """
    if state.dim() == 3:
        rows = [None if t is None else t.unsqueeze(1) for t in (x, dt, B, C, z)]
        own = [None if t is None else t.unsqueeze(0) for t in (A, D, dt_bias)]
        x, dt, B, C, z = rows  # type: ignore[assignment]
        A, D, dt_bias = own  # type: ignore[assignment]
        update = (state.unsqueeze(1), x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
        return state_update(*update).squeeze(1)
    groups = B.shape[1]
    before = state if state_batch_indices is None else state[state_batch_indices.long().clamp(min=0)]
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = functional.softplus(steps) if dt_softplus else steps
    b, c = (t.float().repeat_interleave(state.shape[1] // groups, 1) for t in (B, C))
    decay = torch.exp(steps.unsqueeze(-1) * A.float())
    after = before.float() * decay + (steps * x.float()).unsqueeze(-1) * b.unsqueeze(-2)
    result = (after @ c.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        result = result + x.float() * D.float()
    if z is not None:
        result = result * functional.silu(z.float())
    after = after.to(state.dtype)
    if state_batch_indices is not None:
        result = torch.where(state_batch_indices[:, None, None] < 0, 0.0, result)
        after = with_rows(state, state_batch_indices, after)
    state.copy_(after)
    return result.to(x.dtype)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The sizes of the steps, [batch, channels, L], in float32."""
    if bias is not None:
        dt = dt + bias.float().unsqueeze(1)
    return functional.softplus(dt) if softplus else dt
