"""xformers' operator, with a kernel for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxplug.torch_private import DispatchKey, has_kernel_for_dispatch_key
from onnxplug_xformers import attention

_OPERATOR = "xformers_flash::flash_fwd"
#: The schema of xformers 0.0.35.
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, SymInt window_left, "
    "SymInt window_right, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)"
)


def define() -> None:
    """Defines xformers' operator where torch doesn't know it, and a kernel for the CPU where it has none."""
    if not hasattr(torch.ops.xformers_flash, "flash_fwd"):
        definition = torch.library.custom_op(
            _OPERATOR, attention.flash, mutates_args=(), device_types="cpu", schema=SCHEMA
        )
        definition.register_fake(_shapes)
    elif not has_kernel_for_dispatch_key(_OPERATOR, DispatchKey.CPU):
        torch.library.register_kernel(_OPERATOR, "cpu", attention.flash)


def _shapes(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (query.shape[0], query.shape[2], query.shape[1]) if query.dim() == 4 else (query.shape[1], query.shape[0])
    total = query.new_empty(sizes, dtype=torch.float32)
    return torch.empty_like(query), total, query.new_empty((2,), dtype=torch.int64)
