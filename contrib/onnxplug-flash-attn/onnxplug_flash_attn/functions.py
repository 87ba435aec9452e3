"""flash_attn without a GPU: its operators with kernels for the CPU, and a module of its functions for inference."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onnxplug.torch_private import DispatchKey, has_kernel_for_dispatch_key
from onnxplug_flash_attn import OPERATORS, operators
from onnxplug_flash_attn.cache import with_cache

_RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
#: The schemas of flash_attn 2.8.3.
SCHEMAS = {
    "_flash_attn_forward": "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax)",
    "_flash_attn_varlen_forward": "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False)",
}


def define() -> None:
    """Defines the operators that torch doesn't know, and a kernel for the CPU where an operator has none."""
    for name, schema in SCHEMAS.items():
        kernel, op = getattr(operators, OPERATORS[name]), f"flash_attn::{name}"
        if not hasattr(torch.ops.flash_attn, name):
            definition = torch.library.custom_op(
                op, kernel, mutates_args=(), device_types="cpu", schema=f"{schema} -> {_RESULTS}"
            )
            definition.register_fake(_shapes)
        elif not has_kernel_for_dispatch_key(op, DispatchKey.CPU):
            torch.library.register_kernel(op, "cpu", kernel)


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    total = q.new_empty(sizes, dtype=torch.float32)
    return torch.empty_like(q), total, q.new_empty((0,)), q.new_empty((2,), dtype=torch.int64)


def put_module() -> None:
    """Puts a module of the functions under the name ``flash_attn`` where the library isn't installed."""
    if "flash_attn" in sys.modules or find_spec("flash_attn") is not None:
        return
    module = ModuleType("flash_attn", "flash_attn's functions for inference, from onnxplug_flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    interface = ModuleType("flash_attn.flash_attn_interface", module.__doc__)
    interface.__spec__ = ModuleSpec(interface.__name__, None)
    for function in (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    ):
        for owner in (module, interface):
            setattr(owner, function.__name__, function)
    module.__path__ = []
    vars(module)["flash_attn_interface"] = interface
    sys.modules.update({"flash_attn": module, interface.__name__: interface})


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of queries, keys and values, each [batch, sequence, heads, E]."""
    results = torch.ops.flash_attn._flash_attn_forward(
        q, k, v, dropout_p, _scale(q, softmax_scale), causal, *window_size, softcap, alibi_slopes, False
    )
    return results[:3] if return_attn_probs else results[0]


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """:func:`flash_attn_func` with keys and values in one tensor, [batch, sequence, 2, heads, E]."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """:func:`flash_attn_func` with queries, keys and values in one tensor, [batch, sequence, 3, heads, E]."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of sequences one after the other, [rows, heads, E]; ``cu_seqlens`` has their offsets and the end."""
    results = torch.ops.flash_attn._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, _scale(q, softmax_scale), causal,
        *window_size, softcap, alibi_slopes, False, block_table,
    )  # fmt: skip
    return results[:3] if return_attn_probs else results[0]


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor, [rows, 2, heads, E]."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """:func:`flash_attn_varlen_func` with queries, keys and values in one tensor, [rows, 3, heads, E]."""
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention with a cache, which ``k`` and ``v`` are written to."""
    results = with_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, None, _scale(q, softmax_scale), causal, *window_size, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    return results if return_softmax_lse else results[0]


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
