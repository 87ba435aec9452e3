"""Attention that models compute in modules of their own, by a function such as other models of transformers call."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from onnxplug_transformers.exchanged import modeling_of
from onnxplug_transformers.genai import context_length

#: The attention function of other models: ``(module, query, key, value, mask, scaling=, bias=)``, queries as
#: [batch, heads, sequence, width].
Attention = Callable[..., tuple[torch.Tensor, Any]]


def _falcon(attention: Attention) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: Any,
        alibi: Any,
        attention_mask: Any,
        *_: Any,
        position_embeddings: Any = None,
        **__: Any,
    ) -> Any:
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is None:
            query, key = modeling_of(self).apply_rotary_pos_emb(query, key, *position_embeddings)
        bias = None if alibi is None else self.bias_of_keys
        result, _ = attention(self, query, key, value, None, scaling=self.inv_norm_factor, bias=bias)
        return self.dense(result.flatten(2)), None

    return forward


def _bloom(attention: Attention) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Any, residual: Any, *_: Any, **__: Any) -> Any:
        rows = self._reshape(self.query_key_value(hidden_states))
        result, _ = attention(self, *rows, None, scaling=self.inv_norm_factor, bias=self.bias_of_keys)
        return self.dense(result.flatten(2)) + residual, None

    return forward


def _mpt(attention: Attention) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Any, *_: Any, **__: Any) -> Any:
        rows = self.Wqkv(hidden_states)
        if self.clip_qkv:
            rows = rows.clamp(-self.clip_qkv, self.clip_qkv)
        parts = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in rows.chunk(3, dim=2))
        result, _ = attention(self, *parts, None, scaling=self.softmax_scale, bias=self.bias_of_keys)
        return self.out_proj(result.flatten(2)), None

    return forward


def _gptj(attention: Attention) -> Callable[..., Any]:
    def attend(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        rows = (x.to(value.dtype) for x in (query, key, value))
        result, weights = attention(self, *rows, None, scaling=1 / self.scale_attn)
        return result.transpose(1, 2), weights

    return attend


#: Class of a module to the method that computes its attention, and to the function that makes its replacement.
_METHODS: dict[str, tuple[str, Callable[[Attention], Callable[..., Any]]]] = {
    "FalconAttention": ("forward", _falcon),
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "GPTJAttention": ("_attn", _gptj),
    "CodeGenAttention": ("_attn", _gptj),
}


def _modules(model: Any) -> list[tuple[Any, str, Callable[[Attention], Callable[..., Any]]]]:
    # A class of the same name in another library may compute something else.
    own = (m for m in model.modules() if type(m).__module__.startswith("transformers.models."))
    return [(m, *_METHODS[type(m).__name__]) for m in own if type(m).__name__ in _METHODS]


def has_own_attention(model: Any) -> bool:
    """Whether a model has modules of attention that are known here."""
    return bool(_modules(model))


def bias_of(model: Any) -> torch.Tensor | None:
    """[heads, length of texts]: the bias on the scores of the key at each place; ``None`` for models without ALiBi."""
    kinds, config = {type(module).__name__ for module, *_ in _modules(model)}, model.config
    functions, length = modeling_of(model), context_length(config)
    if "MptAttention" in kinds:
        bias = functions.build_mpt_alibi_tensor(config.n_heads, length)
    elif "BloomAttention" in kinds or ("FalconAttention" in kinds and config.alibi):
        mask = torch.ones(1, length, dtype=torch.int64)  # Falcon rounds the product of slopes and places to bfloat16
        bias = functions.build_alibi_tensor(mask, config.num_attention_heads, torch.float32)
    else:
        return None
    factor = config.head_dim**-0.5 if "FalconAttention" in kinds else 1.0  # it is added before scores are scaled
    result: torch.Tensor = bias[:, 0] * factor
    return result


def asks_for_a_mask(model: Any) -> bool:
    """Whether a model calls methods of its mask, and so needs a mask."""
    return any(type(module).__name__ == "MptAttention" for module, *_ in _modules(model))


def use_attention(model: Any, attention: Attention) -> None:
    """Lets the modules compute their attention by a function."""
    bias = bias_of(model)
    for module, method, made in _modules(model):
        if bias is not None:
            module.register_buffer("bias_of_keys", bias, persistent=False)
        module.__dict__[method] = MethodType(made(attention), module)


def restore_attention(model: Any) -> None:
    """Lets the modules compute their attention by themselves again."""
    for module, method, _ in _modules(model):
        module.__dict__.pop(method, None)
        module._buffers.pop("bias_of_keys", None)
