"""mamba_ssm's fused norms and activations by ATen operators, in float32 as its kernels; statistics for gradients are ``None``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug import Unsupported


def gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[Tensor, None, None]:
    """``layernorm_gated._layer_norm_fwd``: a norm of each group of rows [M, N], after or before a gate ``silu(z)``."""
    rows = x.float()
    gate = None if z is None else functional.silu(z.float())
    if gate is not None and not norm_before_gate:
        rows = rows * gate
    if group_size is None or group_size == x.shape[1]:
        rows = _normed(rows, weight, bias, eps, is_rms_norm)
    else:
        rows = _normed(rows.unflatten(1, (-1, group_size)), None, None, eps, is_rms_norm).flatten(1)
        rows = rows * weight.float()
        rows = rows if bias is None else rows + bias.float()
    if gate is not None and norm_before_gate:
        rows = rows * gate
    result = rows.to(x.dtype if out is None else out.dtype)
    return result if out is None else out.copy_(result), None, None


def layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Any, ...]:
    """``layer_norm._layer_norm_fwd``: the norm of a sum of rows [M, N], with one weight or two, and the sum itself.

    ``rowscale`` [M] scales ``x``.
    """
    if dropout_p:
        raise Unsupported(
            "mamba_ssm's dropout draws its own random numbers, which ONNX has no operator for",
            hint="Export the model in evaluation mode.",
        )
    total = x.float()
    if rowscale is not None:
        total = total * rowscale.float().unsqueeze(1)
    for other in (x1, residual):
        total = total if other is None else total + other.float()
    dtype = x.dtype if out_dtype is None else out_dtype
    first = _normed(total, weight, bias, eps, is_rms_norm).to(dtype)
    second = None if weight1 is None else _normed(total, weight1, bias1, eps, is_rms_norm).to(dtype)
    kept = residual.dtype if residual is not None else residual_dtype
    unchanged = residual is None and x1 is None and rowscale is None and kept in (None, x.dtype)
    return first, second, None, None, x if unchanged else total.to(kept or x.dtype), None, None, None


def swiglu(xy: Tensor, out: Tensor | None = None) -> Tensor:
    """``_swiglu_fwd``: ``silu(x) * y`` of the two halves of the last axis."""
    x, y = xy.float().chunk(2, -1)
    result = functional.silu(x) * y
    return result.to(xy.dtype) if out is None else out.copy_(result.to(out.dtype))


def _normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_rms_norm: bool) -> Tensor:
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    if not is_rms_norm:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    rows = functional.rms_norm(x, x.shape[-1:], weight, eps)
    return rows if bias is None else rows + bias
