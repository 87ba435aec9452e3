"""Experts with weights of 4 bits, which ONNX Runtime reads as they are: ``QMoE``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onnxplug_transformers.rounding import in_steps, restored, rounded, stored

_DOMAIN = "com.microsoft"
#: Larger than any activation: it stands for no limit.
_ANY = 1e30


@torch.library.custom_op("onnxplug_transformers::experts_nbits", mutates_args=())
def experts_nbits(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    up: list[torch.Tensor],
    up_zeros: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down: list[torch.Tensor],
    down_zeros: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    count: int,
    gate: list[float],
    step: bool,
) -> torch.Tensor:
    """The weighted sum of the experts' results for rows, products of ``(up + beta) * gate * sigmoid(alpha * gate)``.

    Args:
        x: [T, H] floats.
        chosen: [T, experts], 1 for the experts of each row and 0 for others.
        shares: [T, experts], the weights of their results.
        up: Levels, [experts, 2 * F, H / 2] bytes with two numbers in each, and scales, [experts, 2 * F, blocks]; rows of gate and
            up in turns.
        up_zeros: [experts, 2 * F, (blocks + 1) / 2] bytes, two zero points in each; ``None``: all zero points are in
            the middle.
        up_bias: [experts, 2 * F].
        down, down_zeros, down_bias: The same for the second product: [experts, H, ...] of F.
        gate: alpha, beta, and the limit to which gate and up are clamped.
        step: Whether blocks of the inputs of products are rounded to 127 steps, as ONNX Runtime does at accuracy level 4.

    Returns:
        [T, H].
    """
    alpha, beta, limit = gate
    result = torch.zeros_like(x)
    for expert in range(chosen.shape[1]):
        rows = chosen[:, expert].nonzero().squeeze(1)
        both = _product(x[rows], up, up_zeros, up_bias, expert, step)
        gates, ups = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        inner = gates * torch.sigmoid(alpha * gates) * (ups + beta)
        made = _product(inner, down, down_zeros, down_bias, expert, step)
        result.index_add_(0, rows, made * shares[rows, expert, None])
    return result


def _product(
    x: torch.Tensor,
    matrices: list[torch.Tensor],
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    expert: int,
    step: bool,
) -> torch.Tensor:
    levels, scales = (part[expert] for part in matrices)
    blocks = levels.unflatten(-1, (scales.shape[-1], -1))
    weight = restored(blocks, scales.to(x.dtype), 4, None if zeros is None else zeros[expert])
    x = in_steps(x, blocks.shape[-1] * 2) if step else x
    return nn.functional.linear(x, weight, None if bias is None else bias[expert])


@experts_nbits.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def convert(g: Any, node: Any) -> Any:
    """Emits QMoE with float activations; ``four_bits.set_accuracy_level`` sets the level of a finished model."""
    x, chosen, shares, up, up_zeros, up_bias, down, down_zeros, down_bias, count, gate, _ = node.args
    alpha, beta, limit = gate
    (ups, up_scales), (downs, down_scales) = (
        (g.op.Reshape(levels, g.const([*levels.shape[:2], -1])), g.cast(scales, x.dtype))
        for levels, scales in (up, down)
    )
    return g.domain(_DOMAIN).QMoE(
        *(x, chosen, ups, up_scales, up_bias, downs, down_scales, down_bias, None, None, None),
        *(up_zeros, down_zeros, None, shares),
        k=count,
        activation_type="swiglu",
        activation_alpha=alpha,
        activation_beta=beta,
        swiglu_fusion=1,
        **({"swiglu_limit": limit} if limit < _ANY else {}),
        expert_weight_bits=4,
        block_size=ups.shape[-1] * 2 // up_scales.shape[-1],
        normalize_routing_weights=0,
        accuracy_level=1,
    )


class FourBitExperts(nn.Module):
    """Experts as ``QMoE`` computes them, in the place of transformers' experts.

    Args:
        gate: alpha, beta and limit, of :func:`gate_of`.
        zero_points: Whether blocks have a zero point of their own.
    """

    #: Whether the activations are rounded too.
    step = False
    up_bias: Any
    down_bias: Any
    up_zeros: Any
    down_zeros: Any

    def __init__(self, experts: Any, gate: list[float], size: int, *, zero_points: bool = False) -> None:
        super().__init__()
        self.gate, self.num_experts = gate, experts.num_experts
        for name, (weight, bias) in {"up": _up(experts), "down": _down(experts)}.items():
            levels, scales, zeros = rounded(weight.flatten(0, 1), size, 4, zero_points=zero_points)
            apart = (self.num_experts, -1)
            self.register_buffer(f"{name}_levels", levels.flatten(1).unflatten(0, apart))
            self.register_buffer(f"{name}_scales", stored(scales.unflatten(0, apart)))
            self.register_buffer(f"{name}_zeros", None if zeros is None else zeros.unflatten(0, apart))
            self.register_buffer(f"{name}_bias", bias)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] of rows [T, H], the experts of each row and the weights of their results, both [T, K]."""
        none = hidden_states.new_zeros(hidden_states.shape[0], self.num_experts)
        weights = top_k_weights.to(hidden_states.dtype)
        result: torch.Tensor = experts_nbits(
            hidden_states,
            none.scatter(1, top_k_index, 1.0),
            none.scatter(1, top_k_index, weights),
            [self.up_levels, self.up_scales],
            self.up_zeros,
            self.up_bias,
            [self.down_levels, self.down_scales],
            self.down_zeros,
            self.down_bias,
            top_k_index.shape[-1],
            self.gate,
            self.step,
        )
        return result


def gate_of(module: Any, size: int) -> list[float] | None:
    """The constants of the gate between the two products of transformers' experts: alpha, beta and limit.

    Returns:
        The constants; ``None`` where the module has no such experts, ``QMoE`` has no such gate, or blocks of ``size``
        numbers do not fit.
    """
    plain = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", True)
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not plain or not all(isinstance(w, nn.Parameter) and w.dim() == 3 and w.is_floating_point() for w in weights):
        return None
    up, down = _up(module)[0], _down(module)[0]
    if up.shape[2] % size or down.shape[2] % size:
        return None
    # Rows of all magnitudes show a limit that the module has under another name.
    magnitudes = 10.0 ** torch.arange(-4, 16)[:, None]
    raw = magnitudes * torch.randn(len(magnitudes), up.shape[1], generator=torch.Generator().manual_seed(0))
    both = _in_turns(raw.T, module).T
    alpha = getattr(module, "alpha", None) or getattr(module, "swiglu_alpha", None)
    limit = getattr(module, "limit", None) or getattr(module, "swiglu_limit", None)
    for beta in (0.0, 1.0):
        constants = [float(alpha or 1.0), beta, float(limit or _ANY)]
        gates, ups = both[:, 0::2].clamp(max=constants[2]), both[:, 1::2].clamp(-constants[2], constants[2])
        mine = gates * torch.sigmoid(constants[0] * gates) * (ups + beta)
        with torch.no_grad():
            if torch.allclose(mine, module._apply_gate(raw), 1e-4, 1e-4):
                return constants
    return None


def _up(experts: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first weight, [experts, 2 * F, H], rows of gate and up in turns, and its bias."""
    weight = experts.gate_up_proj.detach()
    weight = weight.transpose(1, 2) if experts.is_transposed else weight
    bias = experts.gate_up_proj_bias.detach() if experts.has_bias else None
    return _in_turns(weight, experts, 1), None if bias is None else _in_turns(bias, experts, 1)


def _down(experts: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The second weight, [experts, H, F], and its bias."""
    weight = experts.down_proj.detach()
    weight = weight.transpose(1, 2) if experts.is_transposed else weight
    return weight, experts.down_proj_bias.detach() if experts.has_bias else None


def _in_turns(x: torch.Tensor, experts: Any, axis: int = 0) -> torch.Tensor:
    """Gates and ups in turns along an axis, where transformers has all gates first."""
    return (
        x.unflatten(axis, (2, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1) if experts.is_concatenated else x
    )
