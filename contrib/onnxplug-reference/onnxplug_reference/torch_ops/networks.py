"""Products, convolutions, pools, normalisations and recurrent layers by PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import Kernel
from onnxplug_reference.standard.planes import transposed
from onnxplug_reference.standard.pools import Window, window


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """alpha A B + beta C, without C where beta is 0."""
    product = torch.matmul(a.mT if transA else a, b.mT if transB else b)
    scale = alpha if product.is_floating_point() else int(alpha)
    result = product * scale if scale != 1 else product
    return result if c is None or not beta else result + (c * (beta if c.is_floating_point() else int(beta)))


def einsum(*inputs: Tensor, equation: str) -> Tensor:
    """Einstein's sums of products by letters of axes."""
    return torch.einsum(equation.replace(" ", ""), *inputs)


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], value: float) -> Tensor:
    flat = [amount for pair in reversed(pads) for amount in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def conv(x: Tensor, w: Tensor, b: Tensor | None = None, *, group: int = 1, **attributes: Any) -> Tensor:
    """A convolution of 1, 2 or 3 spatial axes."""
    if x.dim() - 2 not in _CONV:
        raise NotImplementedError("torch convolves 1, 2 or 3 axes")
    window_ = window(x, **{**attributes, "kernel_shape": w.shape[2:]})
    return _CONV[x.dim() - 2](_padded(x, window_.pads, 0), w, b, window_.strides, 0, window_.dilations, group)


def conv_transpose(x: Tensor, w: Tensor, b: Tensor | None = None, *, group: int = 1, **attributes: Any) -> Tensor:
    """A transposed convolution: its whole result, cut at both ends by the padding."""
    rank = x.dim() - 2
    if rank not in _CONV_TRANSPOSE:
        raise NotImplementedError("torch convolves 1, 2 or 3 axes")
    window_ = transposed(x, w, **attributes)
    whole = _CONV_TRANSPOSE[rank](x, w, None, window_.steps, 0, 0, group, window_.spread)
    rows = zip(window_.starts, window_.sizes, whole.shape[2:], strict=True)
    whole = _padded(whole, [(-start, start + size - full) for start, size, full in rows], 0)
    return whole if b is None else whole + b.reshape(-1, *[1] * rank)


def _windows(x: Tensor, window_: Window, value: float) -> Tensor:
    """The windows of the spatial axes of x padded with a value, [N, C, counts..., elements]."""
    x = _padded(x, window_.ends, value)
    for i, (k, s, d) in enumerate(zip(window_.kernel, window_.strides, window_.dilations, strict=True)):
        x = x.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
    return x.flatten(2 + len(window_.kernel))


def max_pool(x: Tensor, *, outputs: int, storage_order: int = 0, **attributes: Any) -> Tensor:
    """The largest element of each window; padding never counts."""
    if outputs > 1:
        raise NotImplementedError("places of the largest elements are found in NumPy")
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    return _windows(x, window(x, **attributes), lowest).amax(-1)


def average_pool(x: Tensor, *, count_include_pad: int = 0, **attributes: Any) -> Tensor:
    """The mean of each window."""
    window_ = window(x, **attributes)
    return _windows(x, window_, 0).sum(-1) / torch.from_numpy(window_.counted(x, padding=bool(count_include_pad))).to(x)


def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[Tensor, ...]:
    """Normalises channels by the running statistics, or in training by their own, which update the running."""
    axes = [i for i in range(x.dim()) if i != 1]
    form = (1, -1, *[1] * (x.dim() - 2))
    used_mean, used_var = mean, var
    if training_mode:
        used_mean, used_var = x.mean(axes), x.var(axes, correction=0)
    wide = used_var.to(x.dtype).reshape(form)
    result = (x - used_mean.to(x.dtype).reshape(form)) / torch.sqrt(wide + epsilon) * scale.to(x.dtype).reshape(form)
    result = result + bias.to(x.dtype).reshape(form)
    if not training_mode:
        return (result,)
    return result, *(
        old * momentum + new.to(old.dtype) * (1 - momentum) for old, new in ((mean, used_mean), (var, used_var))
    )


def _normalized(x: Tensor, epsilon: float) -> Tensor:
    """x, [N, groups, ...], normalised along the axes of a group, of any number of elements; narrow floats in float32."""
    wide, axes = x if x.dtype == torch.float64 else x.float(), list(range(2, x.dim()))
    centred = wide - wide.mean(axes, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + epsilon)


def _scaled(wide: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A scale and a bias for each channel, in the dtype of x."""
    form = (-1, *[1] * (x.dim() - 2))
    return (wide * scale.to(wide.dtype).reshape(form) + bias.to(wide.dtype).reshape(form)).to(x.dtype)


def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalises each channel of each instance."""
    return _scaled(_normalized(x, epsilon), x, scale, bias)


def layer_normalization(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, ...]:
    """Normalises along ``axis`` and all later axes; also gives the mean and 1 over the deviation, in float32."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt(wide.var(axes, correction=0, keepdim=True) + epsilon)
    result = ((wide - mean) * inverse).to(x.dtype) * scale
    return (result if bias is None else result + bias), mean.float(), inverse.float()


def group_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Tensor:
    """Normalises each group of channels."""
    groups = x.unflatten(1, (num_groups, -1))
    return _scaled(_normalized(groups, epsilon).flatten(1, 2), x, scale, bias)


def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """x divided by the root of its mean square along ``axis`` and all later axes."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + epsilon)).to(x.dtype) * scale


_GRID = {"linear": "bilinear", "cubic": "bicubic"}


def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    """Samples of x at the places of a grid."""
    if x.dim() == 5 and mode in ("cubic", "bicubic"):
        raise EvaluationError("cubic samples are of two spatial axes")
    return F.grid_sample(x, grid, _GRID.get(mode, mode), padding_mode, bool(align_corners))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    outputs: int,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Tensor, ...]:
    """Attention of heads by ``scaled_dot_product_attention``."""
    if softcap or outputs > 3 or (mask is not None and mask.dtype == torch.bool) or q.dtype == torch.float16:
        raise NotImplementedError("softcap, scores, float16, and masks that may hide a whole row are computed in NumPy")
    flat = q.dim() == 3
    if flat:
        heads = (q_num_heads, kv_num_heads, kv_num_heads)
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), heads, strict=True))
    rows, before = q.shape[2], 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    if mask is not None and (mask.shape[-1] != k.shape[2] or torch.isneginf(mask).any()):
        raise NotImplementedError("masks that may hide a whole row are computed in NumPy")
    if is_causal:
        if rows > k.shape[2] - before:
            raise NotImplementedError("rows without keys are computed in NumPy")
        later = torch.ones(rows, k.shape[2], dtype=torch.bool, device=q.device).triu(1 + before)
        hidden = torch.zeros(rows, k.shape[2], dtype=q.dtype, device=q.device).masked_fill(later, -torch.inf)
        mask = hidden if mask is None else mask + hidden
    result = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return (result.transpose(1, 2).flatten(2) if flat else result), k, v


KERNELS = [
    Kernel("Attention", attention, since=23),
    Kernel("AveragePool", average_pool, since=7),
    Kernel("BatchNormalization", batch_normalization, since=14),
    Kernel("Conv", conv),
    Kernel("ConvTranspose", conv_transpose),
    Kernel("Einsum", einsum, since=12),
    Kernel("Gemm", gemm, since=7),
    Kernel("GlobalAveragePool", lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True)),
    Kernel("GlobalMaxPool", lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True)),
    Kernel("GridSample", grid_sample, since=16),
    Kernel("GroupNormalization", group_normalization, since=21),
    Kernel("InstanceNormalization", instance_normalization, since=6),
    Kernel("LayerNormalization", layer_normalization, since=17),
    Kernel("MatMul", torch.matmul),
    Kernel("MaxPool", max_pool, since=8),
    Kernel("RMSNormalization", rms_normalization, since=23),
]
