"""Mixtures of experts: an operator of PyTorch that becomes ONNX Runtime's MoE, and transformers' models computed by it."""

from __future__ import annotations

import contextlib
from typing import Any

import onnx_ir as ir
import torch

from onnxplug import Decline

_DOMAIN = "com.microsoft"
#: The name of this implementation of experts in transformers.
IMPLEMENTATION = "onnxruntime"


@torch.library.custom_op("onnxplug_ort::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """For each token the weighted sum of its experts, ``down(gate * sigmoid(alpha * gate) * (up + beta))``.

    Args:
        x: Tokens, [S, H].
        index: The k experts of each token, [S, k], all different.
        weights: Their weights, [S, k], none negative.
        gate_up: [E, 2 I, H], or [E, H, 2 I] when ``transposed``.
        down: [E, H, I], or [E, I, H] when ``transposed``.
        gate_up_bias: [E, 2 I].
        down_bias: [E, H].
        alpha: The factor of the sigmoid's operand.
        beta: The summand of ``up``.
        limit: The upper bound of the gate, and the bound of ``up`` on both sides.
        interleaved: Whether the rows of gate and ``up`` alternate; otherwise ``up`` follows the gate.
        transposed: Whether matrices are [in, out].
    """
    result = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, place = torch.where(index == expert)
        both, single = (None if b is None else b[expert] for b in (gate_up_bias, down_bias))
        first, second = (m[expert].mT if transposed else m[expert] for m in (gate_up, down))
        hidden = _gated(torch.nn.functional.linear(x[token], first, both), alpha, beta, limit, interleaved)
        part = torch.nn.functional.linear(hidden, second, single) * weights[token, place, None]
        result.index_add_(0, token, part.to(x.dtype))
    return result


@experts.register_fake
def _(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    for routed in (index, weights):
        torch._check(routed.dim() == 2, lambda: "experts and their weights are [tokens, chosen]")
        torch._check(routed.shape[0] == x.shape[0], lambda: "experts and their weights are for each token")
    torch._check(index.shape[1] == weights.shape[1], lambda: "each chosen expert has a weight")
    return torch.empty_like(x)


def _gated(gate_up: torch.Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool) -> torch.Tensor:
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def plain(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """:func:`experts` without ONNX Runtime's operator: every token gathers its experts' matrices."""
    first, second = (m if transposed else m.mT for m in (gate_up[index], down[index]))
    both = torch.matmul(x[:, None, None, :], first)[:, :, 0]
    if gate_up_bias is not None:
        both = both + gate_up_bias[index]
    result = torch.matmul(_gated(both, alpha, beta, limit, interleaved)[:, :, None, :], second)[:, :, 0]
    if down_bias is not None:
        result = result + down_bias[index]
    return (result * weights[:, :, None]).sum(1).to(x.dtype)


def moe(g: Any, node: Any) -> Any:
    """experts(Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None, Tensor? down_bias=None, float alpha=1.0, float beta=0.0, float? limit=None, bool interleaved=False, bool transposed=False) -> Tensor

    MoE chooses the experts itself, by the softmax of logits: the logarithms of the weights, and -inf elsewhere, give
    the weights over their sum.
    """  # noqa: E501
    x, index, weights, gate_up, down, gate_up_bias, down_bias, alpha, beta, limit, interleaved, transposed = node.args
    if any(
        v is not None and v.dtype != ir.DataType.FLOAT for v in (x, weights, gate_up, down, gate_up_bias, down_bias)
    ):
        raise Decline("the kernel is for float")
    if any(v is not None and g.stored(v) is None for v in (gate_up, down, gate_up_bias, down_bias)):
        raise Decline("the experts are not parameters of the model")
    count, chosen = gate_up.shape[0], index.shape[1]
    if not isinstance(chosen, int):
        raise Decline("the number of experts for each token is dynamic")

    def matrices(value: Any, halves: bool) -> Any:
        """[experts, out, in] with alternating halves, the only layout of the CPU's kernel."""
        if value is None or (not transposed and (interleaved or not halves)):
            return value
        transpose, mix = transposed and len(value.shape) == 3, halves and not interleaved
        return g.derive(value, lambda t: _laid_out(t, transpose, mix), ("experts", transpose, mix), form="rearranged")

    logits = g.op.ScatterElements(
        g.op.Expand(g.const(float("-inf")), g.vector([g.dim(x, 0), count])), index, g.op.Log(weights), axis=1
    )
    result = g.domain(_DOMAIN).MoE(
        x,
        logits,
        matrices(gate_up, True),
        matrices(gate_up_bias, True),
        matrices(down, False),
        down_bias,
        k=chosen,
        normalize_routing_weights=1,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=float(alpha),
        activation_beta=float(beta),
        swiglu_limit=None if limit is None else float(limit),
    )
    result.type, result.shape = ir.TensorType(x.dtype), x.shape
    total = g.op.ReduceSum(weights, [1], keepdims=1)
    zero = g.const(0.0)
    return g.op.Where(g.op.Equal(total, zero), zero, g.op.Mul(result, total))


def _laid_out(tensor: torch.Tensor, transpose: bool, mix: bool) -> torch.Tensor:
    rows = tensor.mT if transpose else tensor
    if mix:
        rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
    return rows.contiguous()


# -- transformers ------------------------------------------------------------------------------------------------------


def set_experts(model: Any) -> Any:
    """Lets a model of transformers compute its experts by ``onnxplug_ort::experts``; returns the model.

    Experts with an activation other than SiLU's and gpt-oss's gates are computed as by ``grouped_mm``.
    """
    from transformers.integrations import moe as interface

    # Some versions refuse a second registration of a name.
    with contextlib.suppress(ValueError):
        interface.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)
    return model


def experts_forward(self: Any, states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts of a transformers model, with the signature of its interface."""
    from transformers.integrations import moe as interface

    gate = _gate(self, interface)
    if gate is None or not self.has_gate or self.has_post_expert_norm or self._is_expert_parallel:
        result: torch.Tensor = interface.grouped_mm_experts_forward(self, states, index, weights)
        return result
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    return experts(
        states,
        index,
        weights,
        self.gate_up_proj,
        self.down_proj,
        *biases,
        interleaved=not self.is_concatenated,
        transposed=self.is_transposed,
        **gate,
    )


def _gate(module: Any, interface: Any) -> dict[str, float] | None:
    """The operator's arguments for the gate; ``None`` where the operator doesn't compute it."""
    if type(module).__name__ == "GptOssExperts":
        return {"alpha": float(module.alpha), "beta": 1.0, "limit": float(module.limit)}
    default = type(module)._apply_gate is interface._default_apply_gate
    return {} if default and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") else None
