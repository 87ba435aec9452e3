"""mmcv's deformable convolutions as torchvision's operator, which has a translation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def deform(
    ctx: Any,
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deform_groups: int = 1,
    bias: bool = False,
    im2col_step: int = 32,
) -> Tensor:
    """``DeformConv2dFunction.forward``, for any batch: ``im2col_step`` is the library's number of images at a time."""
    return modulated(ctx, input, offset, None, weight, None, stride, padding, dilation, groups, deform_groups)


def modulated(
    ctx: Any,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deform_groups: int = 1,
) -> Tensor:
    """``ModulatedDeformConv2dFunction.forward``, in the dtype of the offsets.

    Args:
        ctx: autograd's context, for gradients.
        input: [N, C, H, W]
        offset: [N, 2 deform_groups kh kw, H', W'], y before x.
        mask: [N, deform_groups kh kw, H', W'], or ``None`` for ones.
        weight: [C', C / groups, kh, kw]
        bias: [C']
        stride, padding, dilation: A number, or one for each axis.
        groups: The number of groups of channels.
        deform_groups: The number of groups of channels with offsets of their own.
    """
    import torchvision  # noqa: F401

    pairs = [(v, v) if isinstance(v, int) else tuple(v) for v in (stride, padding, dilation)]
    input, weight = input.type_as(offset), weight.type_as(offset)
    given = offset.new_zeros(offset.shape[0], 0) if mask is None else mask.type_as(offset)
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.type_as(offset)
    sizes = [size for pair in pairs for size in pair]
    options = (*sizes, groups, deform_groups, mask is not None)
    return torch.ops.torchvision.deform_conv2d(input, weight, offset, given, bias, *options)
