"""Linear attention and state spaces while a model is captured: loops over tokens, or chunks of them, as scans.

transformers' own functions loop in Python as often as the sequence is long, and torch.export unrolls that for the example's length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.patches.scans import laid_out, scanned
from onnxplug_transformers.chunks import by_chunks, left_by, visible_tokens
from onnxplug_transformers.exchanged import exchanged, never
from onnxplug_transformers.state_spaces import checked_state_spaces, chunked_state_space, selective_scan


@contextlib.contextmanager
def exportable_recurrences() -> Iterator[None]:
    """Holds while a model is captured: functions and methods of the modules in use are exchanged for others.

    A function with other parameters than its replacement, of another version of transformers, is left as it is.
    """
    from onnxplug_transformers.indexers import selected_tokens

    table = {**_EXCHANGED, "Qwen4ExpTextQSAIndexer.forward": (selected_tokens, never)}
    with exchanged(table), checked_state_spaces():
        yield


# -- delta rules -------------------------------------------------------------------------------------------------------


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet: ``S = exp(g) S + k (beta (v - k S exp(g)))ᵀ`` for each token, whose result is ``q S``.

    Args:
        query: [batch, sequence, heads of keys, K]
        key: [batch, sequence, heads of keys, K]
        value: [batch, sequence, heads, V]; a head of keys serves ``heads // heads of keys`` heads of values.
        g: [batch, sequence, heads], the logarithm of the share of the state that is kept.
        beta: [batch, sequence, heads]
        initial_state: [batch, heads, K, V], or zeros.
        output_final_state: Whether the last state is returned.
        use_qk_l2norm_in_kernel: Whether queries and keys are given the length 1.

    Returns:
        [batch, sequence, heads, V] in the query's dtype; the last state in float32, or ``None``.
    """
    each = value.shape[2] // key.shape[2]
    if each > 1:
        query, key = (x.repeat_interleave(each, dim=2) for x in (query, key))
    decay = g.unsqueeze(-1)
    return _delta_rule(
        query, key, value, decay, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`gated_delta_rule`, with a decay of its own for each channel of the keys: ``g`` is [batch, sequence, heads, K]."""
    return _delta_rule(
        query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunk: int,
    initial: Tensor | None,
    final: bool,
    normalized: bool,
) -> tuple[Tensor, Tensor | None]:
    """Both delta rules; ``decay`` is [batch, sequence, heads, K or 1]. All is computed in float32, as in transformers.

    The values that the tokens of a chunk write depend on the values that earlier tokens of the chunk have written: with
    the state S before the chunk, and A strictly lower triangular, ``(I + A) W = beta (V - K S)``, where keys are
    decayed (S. Yang, J. Kautz and A. Hatamizadeh, Gated Delta Networks, 2024).
    """
    dtype, (batch, _, heads, width) = query.dtype, key.shape
    query, key, value, decay, beta = (x.float() for x in (query, key, value, decay, beta.unsqueeze(-1)))
    if normalized:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))

    def step(state: Tensor, tokens: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = tokens
        since = decay.cumsum(-2)  # the logarithm of the share that is left of the state before the chunk
        last = since[..., -1:, :]
        written, read = _within(key * beta, query, key, since)
        wanted = beta * (value - (key * since.exp()) @ state)
        fresh = _inverse(written.tril(-1), chunk) @ wanted
        result = (query * since.exp()) @ state + read @ fresh
        return state * last.exp().mT + (key * (last - since).exp()).mT @ fresh, result

    if initial is None:
        state = value.new_zeros(batch, heads, width, value.shape[-1])
    else:
        state = initial.to(value)
    # padding neither decays the state (decay is 0) nor writes to it (beta is 0)
    state, result = by_chunks(step, state, (query * width**-0.5, key, value, decay, beta), chunk)
    return laid_out(result.to(dtype)), state if final else None


def _within(left: Tensor, query: Tensor, key: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    """Products of two tensors with the keys of a chunk up to each token, decayed in between: [..., chunk, chunk], twice.

    The logarithms are subtracted before the exponential, which is of numbers that are never positive: nothing
    overflows.
    """
    if since.shape[-1] == 1:
        kept = left_by(since)
        return left @ key.mT * kept, query @ key.mT * kept
    visible = visible_tokens(since)
    between = since.unsqueeze(-2) - since.unsqueeze(-3)
    decayed = key.unsqueeze(-3) * between.masked_fill(~visible.unsqueeze(-1), float("-inf")).exp()
    products = torch.stack([left, query], -2) @ decayed.mT  # for each token: [2, K] by [K, chunk]
    first, second = products.unbind(-2)
    return first, second


def _inverse(strict: Tensor, limit: int) -> Tensor:
    """``(I + strict)⁻¹`` of strictly lower triangular matrices of ``limit`` rows at most: by blocks of 1, 2, 4, ...

    ``[[P, 0], [M, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ M P⁻¹, Q⁻¹]]``; a power series would lose all digits where keys are alike.
    """
    size = strict.shape[-1]
    places = torch.arange(size, device=strict.device)
    result = torch.eye(size, dtype=strict.dtype, device=strict.device)
    block = 1
    while block < limit:
        halves, wholes = places // block, places // (2 * block)
        beside = (wholes[:, None] == wholes) & (halves[:, None] != halves)
        result = result - result @ (strict * beside) @ result
        block *= 2
    return result


# -- other recurrences -------------------------------------------------------------------------------------------------


def weighted_key_values(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Sequence[Tensor] | None = None,
    return_state: bool = False,
) -> tuple[Tensor, list[Tensor] | None]:
    """RWKV's attention: the mean of the values, with weights ``exp(key)`` that decay from token to token.

    Args:
        time_decay: [channels], the logarithm of the logarithm of the decay.
        time_first: [channels], added to the key of the token itself.
        key: [batch, sequence, channels]
        value: [batch, sequence, channels]
        state: Sums of weighted values and of weights, without the factor ``exp(top)``, and ``top``: [batch, channels] each.
        return_state: Whether the last state is returned although no ``state`` is given.

    Returns:
        [batch, sequence, channels], and the last state, or ``None``.
    """
    decay, dtype = -torch.exp(time_decay), key.dtype

    def step(state: list[Tensor], token: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        values, weights, top = state
        key, value = token[0].float(), token[1]

        def added(before: Tensor, own: Tensor) -> list[Tensor]:
            highest = torch.maximum(before, own)
            kept, new = torch.exp(before - highest), torch.exp(own - highest)
            return [kept * values + new * value, kept * weights + new, highest]

        numerator, denominator, _ = added(top, key + time_first)
        return added(top + decay, key), (numerator / denominator).to(dtype)

    first = list(state) if state is not None else [torch.zeros_like(key[:, 0], dtype=torch.float32) for _ in range(3)]
    if state is None:
        first[2] = first[2] - 1e38
    last, results = scanned(step, first, tuple(x.transpose(0, 1) for x in (key, value)))
    return results.transpose(0, 1), list(last) if return_state or state is not None else None


def linear_recurrence(
    self: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """RecurrentGemma's recurrence: ``h = a h + x`` for each token, with ``a`` 0 where ``reset`` marks a beginning.

    Args:
        hidden_states: x, [batch, sequence, channels]
        recurrent_gate: a, [batch, sequence, channels]
        reset: [batch, sequence, 1]
        recurrent_states: [batch, channels], or zeros.

    Returns:
        [batch, sequence, channels], and the last state, [batch, channels].
    """
    dtype = hidden_states.dtype
    if recurrent_states is None:
        recurrent_states = torch.zeros_like(hidden_states[:, 0], dtype=acc_dtype)

    def step(state: Tensor, token: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, gate = token
        state = gate.to(acc_dtype) * state + x.to(acc_dtype)
        return state, state.to(dtype, copy=True)

    sequences = (hidden_states, recurrent_gate * ~reset)
    state, results = scanned(step, recurrent_states.to(acc_dtype), tuple(x.transpose(0, 1) for x in sequences))
    return results.transpose(0, 1), state


def matrix_memory(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> Any:
    """xLSTM's mLSTM, as it is computed for inference, in chunks and in float32.

    ``C = f C + i k vᵀ`` and ``n = f n + i k`` for each token, whose result is ``qᵀ C / max(|qᵀ n|, 1)``, where ``i = exp(igate)``
    and ``f = sigmoid(fgate)``; both states lack the factor ``exp(m)`` (M. Beck et al., xLSTM, 2024).

    Args:
        query: [batch, heads, sequence, K]
        key: [batch, heads, sequence, K]
        value: [batch, heads, sequence, V]
        igate: [batch, heads, sequence]
        fgate: [batch, heads, sequence]
        c_initial: [batch, heads, K, V]; ``None`` for zeros, also of the next two.
        n_initial: [batch, heads, K]
        m_initial: [batch, heads, 1]
        return_last_states: As in the module's own ``forward``, which is called for training.

    Returns:
        [batch, heads, sequence, V], and the last states C, n and m.
    """
    (batch, heads, length, width), dtype = query.shape, query.dtype
    chunk, eps = self.config.chunk_size, self.config.eps
    count = (length + chunk - 1) // chunk
    keeps = functional.logsigmoid(fgate.float())

    def chunks(x: Tensor, filling: float = 0.0) -> Tensor:
        """[count, batch, heads, chunk, ...]; padding behind the end neither forgets nor adds."""
        padding = (*(0 for _ in range(2 * x.dim() - 6)), 0, count * chunk - length)
        return functional.pad(x.float(), padding, value=filling).unflatten(2, (count, chunk)).movedim(2, 0)

    def step(state: list[Tensor], tokens: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        (memory, norm, top), (query, key, value, adds, keeps) = state, tokens
        since = keeps.cumsum(-1)  # [batch, heads, chunk]
        places = torch.arange(chunk, device=query.device)
        between = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(places[:, None] < places, float("-inf"))
        between = between + adds.unsqueeze(-2)
        highest = torch.maximum(since + top, between.amax(-1)).unsqueeze(-1)
        weights = query @ key.mT * (between - highest).exp()
        past = query * ((since + top).unsqueeze(-1) - highest).exp()
        values = past @ memory + weights @ value
        norms = past @ norm.unsqueeze(-1) + weights.sum(-1, keepdim=True)
        result = values / (torch.maximum(norms.abs(), (-highest).exp()) + eps)
        last = since[..., -1:]
        left = last - since + adds
        after = torch.maximum(last + top, left.amax(-1, keepdim=True))
        kept = (last + top - after).exp()
        added = key * (left - after).exp().unsqueeze(-1)
        return [kept.unsqueeze(-1) * memory + added.mT @ value, kept * norm + added.sum(-2), after], result

    shapes = ((width, value.shape[-1]), (width,), (1,))
    first = [
        torch.zeros(batch, heads, *shape, device=query.device) if initial is None else initial.float()
        for shape, initial in zip(shapes, (c_initial, n_initial, m_initial), strict=True)
    ]
    scaled = query.float() * width**-0.5
    sequences = (chunks(scaled), chunks(key), chunks(value), chunks(igate, float("-inf")), chunks(keeps))
    last, results = scanned(step, first, sequences)
    result, _ = results.movedim(0, 2).flatten(2, 3).split([length, count * chunk - length], dim=2)
    return laid_out(result.to(dtype)), tuple(last)


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """MiniMax's linear attention of a prompt: the sum of ``k vᵀ``, which decays by a factor of each head's own.

    The blocks are filled from the end: zeros in front of the text leave the state zero, and the last block is whole.
    """
    length, block = hidden_states.shape[1], self.block_size
    count = (length + block - 1) // block
    padding = count * block - length
    projected = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        projected = (projected * attention_mask.unsqueeze(-1)).to(projected.dtype)
    padded = functional.pad(projected, (0, 0, padding, 0))
    blocks = padded.unflatten(-1, (self.num_attention_heads, -1)).unflatten(1, (count, block)).permute(1, 0, 3, 2, 4)

    def step(state: Tensor, tokens: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query, key, value = tokens
        result = (query * self.query_decay) @ state + (query @ key.mT * self.diagonal_decay) @ value
        kept = torch.exp(-self.slope_rate * block)
        return state * kept + (key * self.key_decay).mT @ value, result

    size = self.head_dim
    state = projected.new_zeros(hidden_states.shape[0], self.num_attention_heads, size, size)
    state, results = scanned(step, state, blocks.split(size, dim=-1))
    _, result = results.permute(1, 0, 3, 2, 4).flatten(1, 2).split([padding, length], dim=1)
    result = self.norm(laid_out(result).flatten(2))
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * result), state


# -- functions and methods that are exchanged --------------------------------------------------------------------------


def _is_packed(*_: Any, **arguments: Any) -> bool:
    """Whether a call has packed sequences to be kept apart: it is left to transformers' own functions."""
    return arguments.get("cu_seqlens") is not None or arguments.get("seq_idx") is not None


def _is_training(module: Any, *_: Any, mode: str | None = None, **__: Any) -> bool:
    return "inference" not in (mode or module.config.mode)


def _continues(module: Any, *_: Any, cache: Any = None, **__: Any) -> bool:
    return cache is not None and cache.get_linear_cache(module.layer_idx) is not None


#: The table for :func:`~onnxplug_transformers.exchanged.exchanged`.
_EXCHANGED: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "torch_chunk_gated_delta_rule": (gated_delta_rule, _is_packed),
    "chunk_kimi_delta_attention": (kimi_delta_attention, _is_packed),
    "mamba_selective_scan": (selective_scan, _is_packed),
    "mamba2_chunk_scan": (chunked_state_space, _is_packed),
    "rwkv_linear_attention": (weighted_key_values, _is_packed),
    "RecurrentGemmaRglru._rnn_scan": (linear_recurrence, _is_packed),
    "xLSTMBackend.forward": (matrix_memory, _is_training),
    "MiniMaxLightningAttention.forward": (lightning_attention, _continues),
}
