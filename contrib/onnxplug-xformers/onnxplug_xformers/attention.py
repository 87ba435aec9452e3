"""xformers' attention by ATen operators, of any sizes: as flash_attn's where its kernels take the bias, else with a mask."""

from __future__ import annotations

import sys
from typing import Any

import torch
from onnxplug_flash_attn import operators
from torch import Tensor
from torch.nn import functional

from onnxplug import Unsupported


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    p: float,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    return_softmax: bool,
    block_tables: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``xformers_flash::flash_fwd``: the result, the logarithms, and the state of random numbers, which is 0 without dropout."""
    rest = (p, softmax_scale, is_causal, window_left, window_right)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, total, _, state = operators.dense(query, key, value, *rest, 0.0, None, return_softmax)
        return out, total, state
    paged: dict[str, Any] = {"block_table": block_tables, "seqused_k": seqused_k}
    tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k)
    out, total, _, state = operators.packed(
        *tensors, max_seqlen_q, max_seqlen_k, *rest, return_softmax=return_softmax, **paged
    )
    return out, total, state


def forward(inp: Any, op: Any = None) -> Tensor:
    """``_memory_efficient_attention`` and ``_memory_efficient_attention_forward``; ``op``, a kernel, is ignored."""
    return _attend(inp)[0]


def forward_with_logarithms(inp: Any, op: Any = None) -> tuple[Tensor, Any]:
    """``_memory_efficient_attention_forward_requires_grad``: the result, and the logarithms in xformers' context."""
    out, total = _attend(inp)
    context = sys.modules["xformers.ops.fmha.common"].Context
    return out, context(lse=total, out=out)


def _attend(inp: Any) -> tuple[Tensor, Tensor]:
    if inp.p:
        raise Unsupported(
            "xformers' dropout draws its own random numbers, which ONNX has no operator for",
            hint="Export the model with p=0.0.",
        )
    inp.validate_inputs()
    dtype = inp.query.dtype if inp.output_dtype is None else inp.output_dtype
    shape = inp.normalize_bmhk()
    out, total = (_by_flash if _is_of_flash(inp) else _by_mask)(inp)
    return out.reshape(shape).to(dtype), total


def _is_of_flash(inp: Any) -> bool:
    """Whether numbers alone describe a bias: masks that end in the lower right corner, and lengths of sequences."""
    kernels, biases = (sys.modules[f"xformers.ops.fmha.{name}"] for name in ("flash", "attn_bias"))
    bias = inp.attn_bias
    if isinstance(bias, biases.BlockDiagonalCausalMask):  # with a window, too: both begin in the upper left corner
        return bool(bias.k_seqinfo.seqstart_py == bias.q_seqinfo.seqstart_py)
    same = inp.query.shape[-1] == inp.value.shape[-1]
    return (
        same and type(bias) is not biases.LowerTriangularMask and type(bias) in kernels.FwOp.SUPPORTED_ATTN_BIAS_TYPES
    )


def _by_flash(inp: Any) -> tuple[Tensor, Tensor]:
    kernels, shape = sys.modules["xformers.ops.fmha.flash"], inp.query.shape
    plain, starts_q, longest_q, starts_k, longest_k, used = kernels._convert_input_format(inp, supports_mqa=True)
    bias = plain.attn_bias
    lengths = (starts_q, starts_k, used, longest_q, longest_k)
    left, right = kernels._window_size(bias)
    rest = (plain.scale_float, kernels._is_causal(bias), left, right, False)
    tables = getattr(bias, "block_tables", None)
    out, total, _ = flash(plain.query, plain.key, plain.value, *lengths, 0.0, *rest, tables)
    return out, kernels._post_process_lse(total, plain, shape)


def _by_mask(inp: Any) -> tuple[Tensor, Tensor]:
    """Attention with a mask, of [batch, rows, heads, K] or [batch, rows, groups, heads, K]; and its logarithms."""
    biases = sys.modules["xformers.ops.fmha.attn_bias"]
    query, key, value = (x.movedim(1, -2) for x in (inp.query, inp.key, inp.value))  # [batch, heads..., rows, K]
    bias = inp.attn_bias
    rows, columns = query.shape[-2], key.shape[-2]
    causal = type(bias) in (biases.LowerTriangularMask, biases.LowerTriangularMaskWithTensorBias)
    if type(bias) is biases.LowerTriangularMaskWithTensorBias:
        bias = bias._bias
    elif bias is not None and not causal and not isinstance(bias, Tensor):
        bias = bias.materialize((rows, columns), torch.float32, query.device)
    mask = bias if isinstance(bias, Tensor) else None
    if causal:
        places = (torch.arange(n, device=query.device) for n in (rows, columns))
        visible = torch.ge(*(x.unsqueeze(1 - i) for i, x in enumerate(places)))
        hidden = torch.zeros((), dtype=torch.float32, device=query.device).masked_fill(~visible, float("-inf"))
        mask = hidden if mask is None else mask + hidden
    scores = (query.float() * inp.scale_float) @ key.float().mT
    scores = scores if mask is None else scores + mask
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=None if mask is None else mask.to(query.dtype), scale=inp.scale_float
    )
    return out.movedim(-2, 1), scores.logsumexp(-1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """xformers' norm, in float32."""
    weight = None if weight is None else weight.float()
    return functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def rms_norm_add(x: Tensor, y: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """The norm of a sum, which is written to ``x``."""
    total = x.float() + y.float()
    x.copy_(total)
    return rms_norm(total, weight, eps).to(x.dtype)
