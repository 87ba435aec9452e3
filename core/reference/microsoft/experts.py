"""Mixtures of experts of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug.reference.kernels import Kernel
from onnxplug.reference.numeric import sigmoid, silu, typed
from onnxplug.reference.standard.activations import gelu
from onnxplug.reference.standard.softmax import softmax

Activation = Callable[[np.ndarray], np.ndarray]
_ACTIVATIONS: dict[str, Activation] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": partial(gelu, approximate="tanh"),
    "silu": silu,
    "identity": lambda x: x,
}


def moe(
    x: np.ndarray,
    router_probs: np.ndarray,
    fc1_experts_weights: np.ndarray,
    fc1_experts_bias: np.ndarray | None = None,
    fc2_experts_weights: np.ndarray | None = None,
    fc2_experts_bias: np.ndarray | None = None,
    fc3_experts_weights: np.ndarray | None = None,
    fc3_experts_bias: np.ndarray | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    use_sparse_mixer: int = 0,
) -> np.ndarray:
    """Each token's k best experts, fc2(activation(fc1(x))), weighted by the softmax of the router's numbers.

    Args:
        x: [tokens, hidden] or [batch, sequence, hidden].
        router_probs: Logarithms of weights, [tokens, experts].
        fc1_experts_weights: [experts, inner, hidden]; twice the inner size for a fused swiglu.
        fc2_experts_weights: [experts, hidden, inner].
        fc3_experts_weights: [experts, inner, hidden]: the other factor, where swiglu is not fused.
    """
    if use_sparse_mixer or fc2_experts_weights is None:
        raise EvaluationError("use_sparse_mixer, and experts without a second layer, are ONNX Runtime's alone")
    tokens = x.reshape(-1, x.shape[-1])
    weights = softmax(router_probs.astype(np.float64), -1)
    best = np.argsort(-weights, -1, kind="stable")[:, :k]
    chosen = np.take_along_axis(weights, best, -1)
    if normalize_routing_weights:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    gated = partial(_swiglu, alpha=activation_alpha, beta=activation_beta, limit=swiglu_limit)
    result = np.zeros(tokens.shape, np.float64)
    for expert in np.unique(best):
        rows, places = np.nonzero(best == expert)
        inner = _linear(tokens[rows], fc1_experts_weights, fc1_experts_bias, expert)
        if activation_type == "swiglu":
            if swiglu_fusion == 1:
                hidden = gated(inner[:, 0::2], inner[:, 1::2])
            elif swiglu_fusion == 2:
                hidden = gated(*np.split(inner, 2, -1))
            elif fc3_experts_weights is not None:
                hidden = gated(inner, _linear(tokens[rows], fc3_experts_weights, fc3_experts_bias, expert))
            else:
                raise EvaluationError("swiglu is not fused (swiglu_fusion=0), and there is no fc3")
        elif activation_type in _ACTIVATIONS:
            hidden = _ACTIVATIONS[activation_type](inner)
            if fc3_experts_weights is not None:
                hidden = hidden * _linear(tokens[rows], fc3_experts_weights, fc3_experts_bias, expert)
        else:
            raise EvaluationError(f"unknown activation {activation_type!r}")
        outputs = _linear(hidden, fc2_experts_weights, fc2_experts_bias, expert)
        np.add.at(result, rows, outputs * chosen[rows, places, None])
    return typed(result, x).reshape(x.shape)


def _linear(x: np.ndarray, weights: np.ndarray, bias: np.ndarray | None, expert: int) -> np.ndarray:
    result = x @ weights[expert].T
    return result if bias is None else result + bias[expert]


def _swiglu(gate: np.ndarray, linear: np.ndarray, *, alpha: float, beta: float, limit: float | None) -> np.ndarray:
    """gate sigmoid(alpha gate) (linear + beta), both kept within a limit."""
    if limit is not None:
        gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
    return gate * sigmoid(alpha * gate) * (linear + beta)


KERNELS = [Kernel("MoE", moe, domain="com.microsoft")]
