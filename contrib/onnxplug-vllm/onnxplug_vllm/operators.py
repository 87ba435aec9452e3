"""The operators by ATen operators, in float32 as in the kernels; they return the new values of the written tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug import Unsupported


def _normalised(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """In float32, divided by the root of the mean square of the last axis, and times the weight."""
    return functional.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), epsilon)


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float, *_: Any) -> tuple[Tensor]:
    """``rms_norm``, ``rmsnorm``: a norm of root mean squares.

    Args:
        result: The tensor that is written.
        input: [..., width]
        weight: [width]
        epsilon: Added to the mean square.
    """
    return (_normalised(input, weight, epsilon).to(result.dtype),)


def gemma_rms_norm(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> tuple[Tensor]:
    """:func:`rms_norm` with 1 + weight."""
    return (_normalised(input, weight.float() + 1.0, eps).to(output.dtype),)


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, *_: Any
) -> tuple[Tensor, Tensor]:
    """The norm of a sum in place of the input, and the sum in place of the residual.

    Args:
        input, residual: [..., width]
        weight: [width]
        epsilon: Added to the mean square.
    """
    total = (input.float() + residual.float()).to(residual.dtype)
    return _normalised(total, weight, epsilon).to(input.dtype), total


def gemma_fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool
) -> tuple[Tensor, Tensor]:
    """:func:`fused_add_rms_norm` with 1 + weight."""
    total = (input.float() + residual.float()).to(residual.dtype)
    return _normalised(total, weight.float() + 1.0, eps).to(input.dtype), total


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> tuple[Tensor, ...]:
    """Each head's elements turned in pairs, by the angles of its token's position.

    Args:
        positions: [tokens] or [batch, sequence]
        query: [*positions, heads × head_size] or [*positions, heads, head_size]
        key: Keys of as many or fewer heads; ``None`` where there are no keys.
        head_size: The elements of a head.
        cos_sin_cache: [positions, turned elements]: cosines, then sines.
        is_neox: Whether pairs are of the first and the second half of the turned elements, otherwise of neighbours.
        rope_dim_offset: The number of elements of a head before the turned elements.
        inverse: Whether the elements are turned back.

    Returns:
        The new values of query, and of key where it isn't ``None``.
    """
    cosines, sines = cos_sin_cache[positions.long()].float().unsqueeze(-2).chunk(2, -1)
    sines = -sines if inverse else sines
    return tuple(
        _turned(x.reshape(*positions.shape, -1, head_size), cosines, sines, is_neox, rope_dim_offset).reshape(x.shape)
        for x in (query, key)
        if x is not None
    )


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, halves: bool, offset: int) -> Tensor:
    """Heads [..., heads, elements], turned behind an offset."""
    width = 2 * cosines.shape[-1]
    before, turned, behind = x.split([offset, width, x.shape[-1] - offset - width], -1)
    first, second = turned.float().chunk(2, -1) if halves else turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    both = (first * cosines - second * sines, second * cosines + first * sines)
    result = torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)
    return torch.cat([before, result.to(x.dtype), behind], -1)


def rotary_embedding_of_pairs(
    q: Tensor,
    k: Tensor,
    q_rope: Tensor,
    k_rope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    interleave: bool,
    *more: Any,
) -> tuple[Tensor, Tensor]:
    """``apply_rope_pos_ids_cos_sin_cache``: queries and keys [tokens, heads, head_size] turned.

    Args:
        q, k: The queries and keys.
        q_rope, k_rope: The tensors that are written.
        cos_sin_cache: [positions, turned elements]: cosines, then sines.
        pos_ids: [tokens]
        interleave: Whether pairs are of neighbours, otherwise of the two halves.
        more: Options that do not change the numbers, and a cache for the keys and values, which is refused.
    """
    if any(isinstance(x, Tensor) for x in more):
        raise Unsupported("a cache of keys and values that apply_rope_pos_ids_cos_sin_cache writes")
    results = rotary_embedding(pos_ids, q, k, q.shape[-1], cos_sin_cache, not interleave)
    return results[0].to(q_rope.dtype), results[1].to(k_rope.dtype)


def _gated(out: Tensor, input: Tensor, activation: Callable[[Tensor], Tensor]) -> tuple[Tensor]:
    """The activation of the first half times the second half."""
    gate, up = input.float().chunk(2, -1)
    return ((activation(gate) * up).to(out.dtype),)


def silu_and_mul(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """SiLU of the first half times the second half: [..., 2 × width] to [..., width]."""
    return _gated(out, input, functional.silu)


def mul_and_silu(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """The first half times SiLU of the second half."""
    gate, up = input.float().chunk(2, -1)
    return ((gate * functional.silu(up)).to(out.dtype),)


def gelu_and_mul(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """GELU of the first half times the second half."""
    return _gated(out, input, functional.gelu)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """GELU, by its approximation, of the first half times the second half."""
    return _gated(out, input, lambda x: functional.gelu(x, approximate="tanh"))


def fatrelu_and_mul(out: Tensor, input: Tensor, threshold: float) -> tuple[Tensor]:
    """The first half, 0 up to the threshold, times the second half."""
    return _gated(out, input, lambda x: torch.where(x > threshold, x, 0.0))


def swigluoai_and_mul(out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> tuple[Tensor]:
    """Of neighbours, a gate and a value: ``(value + 1) * gate * sigmoid(alpha * gate)``, after both are limited."""
    gate, up = input.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (((up + 1.0) * gate * torch.sigmoid(alpha * gate)).to(out.dtype),)


def gelu_tanh(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """``gelu_new`` and ``gelu_fast``: GELU by its approximation."""
    return (functional.gelu(input.float(), approximate="tanh").to(out.dtype),)


def gelu_quick(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """``x * sigmoid(1.702 * x)``."""
    x = input.float()
    return ((x * torch.sigmoid(1.702 * x)).to(out.dtype),)


def relu_squared(out: Tensor, input: Tensor) -> tuple[Tensor]:
    """The square of ReLU."""
    return (functional.relu(input.float()).square().to(out.dtype),)
