"""Mixtures of experts of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import microsoft
from onnxplug_reference.numeric import gelu, sigmoid, silu, typed
from onnxplug_reference.standard.softmax import softmax

Activation = Callable[[np.ndarray], np.ndarray]
Gated = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
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
    """The sum of each token's k best experts, fc2(activation(fc1(x))), weighted by the softmax of the router's logits.

    Args:
        x: [tokens, hidden] or [batch, sequence, hidden].
        router_probs: Logarithms of weights, [tokens, experts].
        fc1_experts_weights: [experts, inner, hidden]; twice the inner size for a fused swiglu.
        fc2_experts_weights: [experts, hidden, inner].
        fc3_experts_weights: [experts, inner, hidden], the layer of the activation's second factor, where swiglu is not
            fused.
    """
    if use_sparse_mixer or fc2_experts_weights is None:
        raise EvaluationError("use_sparse_mixer, and experts without a second layer, are ONNX Runtime's alone")
    tokens = x.reshape(-1, x.shape[-1])
    weights = softmax(router_probs.astype(np.float64), -1)
    best = np.argsort(-weights, -1, kind="stable")[:, :k]
    chosen = np.take_along_axis(weights, best, -1)
    if normalize_routing_weights:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    first = fc1_experts_weights, fc1_experts_bias
    other = None if fc3_experts_weights is None else (fc3_experts_weights, fc3_experts_bias)
    activation = _activation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion)
    result = np.zeros(tokens.shape, np.float64)
    for expert in np.unique(best):
        rows, places = np.nonzero(best == expert)
        inner = _linear(tokens[rows], *first, expert)
        hidden = activation(inner, None if other is None else _linear(tokens[rows], *other, expert))
        outputs = _linear(hidden, fc2_experts_weights, fc2_experts_bias, expert)
        np.add.at(result, rows, outputs * chosen[rows, places, None])
    return typed(result, x).reshape(x.shape)


def _activation(name: str, alpha: float, beta: float, limit: float | None, fusion: int) -> Gated:
    """The function from the first layer's results, and the third's where it exists, to an expert's inner values."""
    gate = partial(_swiglu, alpha=alpha, beta=beta, limit=limit)

    def swiglu(inner: np.ndarray, other: np.ndarray | None) -> np.ndarray:
        if fusion == 1:
            return gate(inner[:, 0::2], inner[:, 1::2])
        if fusion == 2:
            return gate(*np.split(inner, 2, -1))
        if other is None:
            raise EvaluationError("swiglu is not fused (swiglu_fusion=0), and there is no fc3")
        return gate(inner, other)

    if name == "swiglu":
        return swiglu
    if name not in _ACTIVATIONS:
        raise EvaluationError(f"unknown activation {name!r}; there are swiglu, {', '.join(_ACTIVATIONS)}")
    function = _ACTIVATIONS[name]
    return lambda inner, other: function(inner) if other is None else function(inner) * other


def _linear(x: np.ndarray, weights: np.ndarray, bias: np.ndarray | None, expert: int) -> np.ndarray:
    result = x @ weights[expert].T
    return result if bias is None else result + bias[expert]


def _swiglu(gate: np.ndarray, linear: np.ndarray, *, alpha: float, beta: float, limit: float | None) -> np.ndarray:
    """gate sigmoid(alpha gate) (linear + beta), with the gate at most ``limit`` and linear within ±``limit``."""
    if limit is not None:
        gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
    return gate * sigmoid(alpha * gate) * (linear + beta)


KERNELS = [microsoft("MoE", moe)]
