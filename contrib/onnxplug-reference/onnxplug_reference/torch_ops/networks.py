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


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices."""
    return torch.matmul(a, b)


def matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    """A product of bytes less their zero points, in int32; those of A are of rows."""
    left, right = a.to(torch.int64), b.to(torch.int64)
    if a_zero is not None:
        left = left - (
            a_zero.to(torch.int64)[:, None] if a_zero.dim() == 1 and a_zero.numel() > 1 else a_zero.to(torch.int64)
        )
    if b_zero is not None:
        right = right - b_zero.to(torch.int64)
    return torch.matmul(left, right).to(torch.int32)


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
    """alpha A B + beta C."""
    product = torch.matmul(a.mT if transA else a, b.mT if transB else b)
    scale = alpha if product.is_floating_point() else int(alpha)
    result = product * scale if scale != 1 else product
    return result if c is None else result + (c * (beta if c.is_floating_point() else int(beta)))


def einsum(*inputs: Tensor, equation: str) -> Tensor:
    """Products and sums by letters of axes."""
    return torch.einsum(equation.replace(" ", ""), *inputs)


def _window(
    x: Tensor,
    kernel: Sequence[int],
    auto_pad: str,
    strides: Sequence[int] | None,
    pads: Sequence[int] | None,
    dilations: Sequence[int] | None,
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and padding at both ends of the spatial axes."""
    rank = x.dim() - 2
    step, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    if auto_pad in ("NOTSET", ""):
        both = list(pads or [0] * 2 * rank)
        return step, spread, [(both[i], both[i + rank]) for i in range(rank)]
    if auto_pad == "VALID":
        return step, spread, [(0, 0)] * rank
    found = []
    for n, k, s, d in zip(x.shape[2:], kernel, step, spread, strict=True):
        total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        small = total // 2
        found.append((small, total - small) if auto_pad == "SAME_UPPER" else (total - small, small))
    return step, spread, found


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], value: float) -> Tensor:
    flat = [amount for pair in reversed(pads) for amount in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A convolution of 1, 2 or 3 spatial axes."""
    if x.dim() - 2 not in _CONV:
        raise NotImplementedError("torch convolves 1, 2 or 3 axes")
    step, spread, ends = _window(x, w.shape[2:], auto_pad, strides, pads, dilations)
    return _CONV[x.dim() - 2](_padded(x, ends, 0), w, b, step, 0, spread, group)


def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A transposed convolution: the whole of it, cut at both ends as the padding says."""
    rank = x.dim() - 2
    if rank not in _CONV_TRANSPOSE:
        raise NotImplementedError("torch convolves 1, 2 or 3 axes")
    step, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    extra = list(output_padding or [0] * rank)
    whole = _CONV_TRANSPOSE[rank](x, w, None, step, 0, 0, group, spread)
    for i in range(rank):
        axis = i + 2
        size = whole.shape[axis] + extra[i]
        if output_shape is not None:
            wanted = output_shape[-rank:][i]
        elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            wanted = x.shape[axis] * step[i]
        else:
            before, after = (pads[i], pads[i + rank]) if pads else (0, 0)
            wanted = size - before - after
        if output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            total = size - wanted
            before = -(-total // 2) if auto_pad != "SAME_UPPER" else total // 2
        flat = [0] * 2 * whole.dim()
        flat[2 * (whole.dim() - 1 - axis)] = -before
        flat[2 * (whole.dim() - 1 - axis) + 1] = wanted - (whole.shape[axis] - before)
        whole = F.pad(whole, flat)
    return whole if b is None else whole + b.reshape(-1, *[1] * rank)


def _ceiled(
    x: Tensor, kernel: Sequence[int], step: list[int], spread: list[int], ends: list[tuple[int, int]], ceil_mode: int
) -> list[tuple[int, int]]:
    """Padding with what ``ceil_mode`` needs at the ends: no window starts in it."""
    if not ceil_mode:
        return ends
    found = []
    for n, k, s, d, (before, after) in zip(x.shape[2:], kernel, step, spread, ends, strict=True):
        width = d * (k - 1) + 1
        count = -(-(n + before + after - width) // s) + 1
        if (count - 1) * s >= n + before:
            count -= 1
        found.append((before, max((count - 1) * s + width - n - before, 0)))
    return found


def _windows(x: Tensor, kernel: Sequence[int], step: Sequence[int], spread: Sequence[int]) -> Tensor:
    """The windows of the spatial axes, [N, C, counts..., window]."""
    rank = x.dim() - 2
    for i, (k, s, d) in enumerate(zip(kernel, step, spread, strict=True)):
        width = d * (k - 1) + 1
        x = x.unfold(2 + i, width, s)[..., ::d]
    return x.flatten(2 + rank)


def max_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    outputs: int,
) -> Tensor:
    """The largest element of each window; padding never counts."""
    if outputs > 1:
        raise NotImplementedError("places of the largest elements are found in NumPy")
    step, spread, ends = _window(x, kernel_shape, auto_pad, strides, pads, dilations)
    ends = _ceiled(x, kernel_shape, step, spread, ends, ceil_mode)
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    return _windows(_padded(x, ends, lowest), kernel_shape, step, spread).amax(-1)


def average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """The mean of each window; padding counts if ``count_include_pad``, what ``ceil_mode`` adds never does."""
    step, spread, ends = _window(x, kernel_shape, auto_pad, strides, pads, dilations)
    wide = _ceiled(x, kernel_shape, step, spread, ends, ceil_mode)
    sums = _windows(_padded(x, wide, 0), kernel_shape, step, spread).sum(-1)
    ones = torch.ones_like(x[:1, :1])
    counted = _padded(ones, ends, 1) if count_include_pad else _padded(ones, ends, 0)
    rest = [(0, max(w[1] - e[1], 0)) for w, e in zip(wide, ends, strict=True)]
    return sums / _windows(_padded(counted, rest, 0), kernel_shape, step, spread).sum(-1)


def lp_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """(sum of |x|^p)^(1/p) of each window."""
    step, spread, ends = _window(x, kernel_shape, auto_pad, strides, pads, dilations)
    ends = _ceiled(x, kernel_shape, step, spread, ends, ceil_mode)
    return _windows(_padded(x.abs() ** p, ends, 0), kernel_shape, step, spread).sum(-1) ** (1 / p)


def global_average_pool(x: Tensor) -> Tensor:
    """The mean of the spatial axes, which stay with size 1."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def global_max_pool(x: Tensor) -> Tensor:
    """The largest element of the spatial axes."""
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    """(sum of |x|^p)^(1/p) of the spatial axes."""
    return (x.abs() ** p).sum(tuple(range(2, x.dim())), keepdim=True) ** (1 / p)


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
    """Each channel normalised by the running mean and variance, or by its own, which the running ones then follow."""
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


def batch_normalization_9(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    outputs: int,
) -> tuple[Tensor, ...]:
    """The same before opset 14: a node with more than one output is in training."""
    if outputs > 1:
        raise NotImplementedError("training before opset 14 is computed in NumPy")
    return batch_normalization(x, scale, bias, mean, var, epsilon=epsilon)


def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each instance normalised."""
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def layer_normalization(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, ...]:
    """The axes from one on normalised; also the mean and 1 over the deviation, in float32."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt(wide.var(axes, correction=0, keepdim=True) + epsilon)
    result = ((wide - mean) * inverse).to(x.dtype) * scale
    return (result if bias is None else result + bias), mean.float(), inverse.float()


def group_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Tensor:
    """Each group of channels normalised."""
    return F.group_norm(x, num_groups, scale, bias, epsilon)


def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """The axes from one on over the root of their mean square."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + epsilon)).to(x.dtype) * scale


def lrn(x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int) -> Tensor:
    """Each element over a power of the mean square of its neighbours in the channels."""
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = F.pad((x * x).movedim(1, -1), (before, after)).unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (bias + alpha / size * squares) ** beta


def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """x over its norm along an axis; 0 where the norm is 0."""
    return F.normalize(x, p, axis, eps=torch.finfo(x.dtype).tiny)


def dropout(x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None, *, seed: int | None = None) -> Any:
    """The input, and a mask of all; dropout itself is random."""
    if training is not None and bool(training) and (ratio is None or float(ratio) > 0):
        raise NotImplementedError("random numbers are drawn in NumPy")
    return x, torch.ones(x.shape, dtype=torch.bool, device=x.device)


_GRID = {"linear": "bilinear", "cubic": "bicubic"}


def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    """Samples at places of a grid."""
    if x.dim() == 5 and mode in ("cubic", "bicubic"):
        raise EvaluationError("cubic samples are of two spatial axes")
    return F.grid_sample(x, grid, _GRID.get(mode, mode), padding_mode, bool(align_corners))


def _scaled_zero(value: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int) -> tuple[Tensor, Any]:
    """Scale and zero point in the form of the value."""

    def formed(parameter: Tensor) -> Tensor:
        if block:
            return parameter.repeat_interleave(block, axis).narrow(axis, 0, value.shape[axis])
        if parameter.numel() == 1:
            return parameter.reshape(())
        return parameter.reshape([-1 if i == axis % value.dim() else 1 for i in range(value.dim())])

    return formed(scale), None if zero is None else formed(zero)


def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """(x - zero point) * scale."""
    if output_dtype or (x.is_floating_point() and x.element_size() == 1):
        raise NotImplementedError("8-bit floats and given types are computed in NumPy")
    factor, offset = _scaled_zero(x, scale, zero, axis, block_size)
    wide = x.to(torch.int64) if offset is None else x.to(torch.int64) - offset.to(torch.int64)
    return (wide.to(torch.float32) * factor.to(torch.float32)).to(scale.dtype)


def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """x / scale + zero point, rounded to the nearest even and kept within the integers."""
    kind = torch.uint8 if zero is None else zero.dtype
    if output_dtype or precision or kind not in (torch.uint8, torch.int8) or x.dtype != torch.float32:
        raise NotImplementedError("other types than float32 and bytes are computed in NumPy")
    factor, offset = _scaled_zero(x, scale, zero, axis, block_size)
    limits = torch.iinfo(kind)
    codes = torch.round(x / factor) + (0 if offset is None else offset.to(torch.float32))
    return codes.clamp(limits.min, limits.max).to(kind)


KERNELS = [
    Kernel("AveragePool", average_pool, since=7),
    Kernel("BatchNormalization", batch_normalization_9, since=9),
    Kernel("BatchNormalization", batch_normalization, since=14),
    Kernel("Conv", conv),
    Kernel("ConvTranspose", conv_transpose),
    Kernel("DequantizeLinear", dequantize_linear, since=10),
    Kernel("Dropout", dropout, since=12),
    Kernel("Einsum", einsum, since=12),
    Kernel("Gemm", gemm, since=7),
    Kernel("GlobalAveragePool", global_average_pool),
    Kernel("GlobalLpPool", global_lp_pool, since=2),
    Kernel("GlobalMaxPool", global_max_pool),
    Kernel("GridSample", grid_sample, since=16),
    Kernel("GroupNormalization", group_normalization, since=21),
    Kernel("InstanceNormalization", instance_normalization, since=6),
    Kernel("LayerNormalization", layer_normalization, since=17),
    Kernel("LpPool", lp_pool, since=2),
    Kernel("LpNormalization", lp_normalization),
    Kernel("LRN", lrn),
    Kernel("MatMul", matmul),
    Kernel("MatMulInteger", matmul_integer, since=10),
    Kernel("MaxPool", max_pool, since=8),
    Kernel("QuantizeLinear", quantize_linear, since=10),
    Kernel("RMSNormalization", rms_normalization, since=23),
]
