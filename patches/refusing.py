"""Operators that refuse some values: ``torch.linalg.cholesky`` refuses a matrix that is not positive definite.

torch.export traces without numbers, so that no operator refuses any. Few operators are known to refuse no value; every other
operator may.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxplug.capture.handlers import ANY, Errors
from onnxplug.torch_private import OpOverload, pytree

#: The errors of torch's kernels about values; a TypeError or a NotImplementedError is about dtypes and devices.
_OF_KERNELS: Errors = (RuntimeError, IndexError, ValueError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
#: The errors of operations on numbers.
OF_NUMBERS: Errors = (ArithmeticError, ZeroDivisionError, OverflowError, ValueError)

#: Operators that accept all values, in addition to views, pointwise operators and reductions; except overloads that read a number
#: from a tensor.
_TAKE_ALL = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _convolution _log_softmax _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _prelu_kernel _reshape_alias
    _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _softmax _to_copy
    _unsafe_view absolute adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d addbmm addmm addmv addr affine_grid_generator alias_copy alpha_dropout
    arange arccos arcsin arctan argsort as_strided_copy avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm
    binary_cross_entropy_with_logits block_diag bmm broadcast_tensors broadcast_to cat cdist chain_matmul
    channel_shuffle chunk col2im column_stack complex concat concatenate constant_pad_nd contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution copy cosine_similarity cross cummax cummin
    cumprod cumsum device diag diag_embed diff dist dot dropout dstack einsum empty empty_like empty_permuted
    empty_strided erf expand_as expand_copy eye feature_dropout fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn flatten flip
    fliplr flipud full full_like glu grid_sampler grid_sampler_2d grid_sampler_3d group_norm hardswish hstack
    huber_loss im2col inner instance_norm isclose isin isreal kron kthvalue l1_loss layer_norm lift lift_fresh_copy
    linalg_cross linalg_diagonal linalg_matmul linalg_vecdot linear linspace log_sigmoid log_sigmoid_forward
    log_softmax logcumsumexp logsumexp masked_fill masked_select matmul max_pool1d max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices median meshgrid mm mode moveaxis movedim mse_loss
    msort mv nanmean nanmedian narrow native_batch_norm native_dropout native_group_norm native_layer_norm negative
    new_empty new_empty_strided new_full new_ones new_zeros nonzero numel ones ones_like outer pad pairwise_distance
    permute_copy pixel_shuffle pixel_unshuffle polar prelu rand rand_like randint randint_like randn randn_like
    randperm ravel reflection_pad1d reflection_pad2d reflection_pad3d relu6 repeat replication_pad1d
    replication_pad2d replication_pad3d rms_norm roll rot90 scalar_tensor scaled_dot_product_attention select_copy
    select_scatter slice_copy slice_scatter smooth_l1_loss softmax softmin sort special_expit special_softmax
    split_copy split_with_sizes_copy squeeze_copy stack sub sum_to_size swapaxes swapdims sym_numel sym_size t_copy
    tensordot tile topk trace transpose_copy tril tril_indices triu triu_indices type_as unflatten unfold_copy
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze_copy upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d
    upsample_nearest_exact2d upsample_nearest_exact3d upsample_trilinear3d vdot view_as view_copy vstack zero zeros
    zeros_like
    """.split()
)
#: Operators without a tag that compute elementwise, like pointwise operators: all their overloads accept all values.
_OF_ELEMENTS = frozenset(
    "bucketize divide fill floor_divide greater greater_equal less less_equal multiply not_equal subtract".split()
)
#: Operators of integers that refuse the divisor 0.
_DIVIDE = frozenset({"div", "divide", "floor_divide", "fmod", "remainder"})
#: Operations that accept all numbers.
_TAKE_ALL_NUMBERS = frozenset(
    getattr(operator, name) for name in "add sub mul neg abs and_ or_ eq ne lt le gt ge".split()
) | {torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not}


def errors_of(func: Any) -> Errors:
    """The errors that an operator may raise: any, if another library has a kernel for it."""
    return _OF_KERNELS if isinstance(func, OpOverload) and func.namespace in ("aten", "prim", "prims") else ANY


def may_refuse(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator may refuse some values of its operands, or sizes that depend on data."""
    if errors_of(func) is ANY or not _takes_all(func):
        return True
    operands = list(filter(_has_symbols, pytree.tree_leaves((args, kwargs))))
    divides = func._schema.name.rpartition("::")[2].rstrip("_") in _DIVIDE
    return bool(free_unbacked_symbols(operands)) or (divides and not any(map(_is_float, operands)))


def may_refuse_numbers(func: Any, args: Any) -> bool:
    """Whether an operation on Python numbers may refuse some values of numbers that depend on data."""
    return func not in _TAKE_ALL_NUMBERS and bool(free_unbacked_symbols(list(filter(_has_symbols, args))))


@functools.lru_cache(maxsize=1024)
def _takes_all(func: Any) -> bool:
    name = func._schema.name.rpartition("::")[2]
    if func.is_view:
        tensors = [a for a in func._schema.arguments if "Tensor" in str(a.type)]
        return len(tensors) == 1  # the tensor's values are the places to split at
    # torch 2.9 has no tag of reductions: there they count as refusing.
    tags = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
    name = name.rstrip("_")
    return bool(tags & set(func.tags)) or name in _OF_ELEMENTS or (name in _TAKE_ALL and not _reads_numbers(func))


def _reads_numbers(func: Any) -> bool:
    """Whether an operator takes a tensor where another overload takes a number: its kernel reads the number, and may refuse it.

    ``masked_fill.Tensor`` refuses a value beyond the range of the result's type, ``narrow.Tensor`` a start beyond the axis.
    """
    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    numbers = {a.name for op in overloads for a in op._schema.arguments if str(a.type) in ("number", "int", "float")}
    return any(a.name in numbers and str(a.type) == "Tensor" for a in func._schema.arguments)


def _has_symbols(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Tensor)


def _is_float(value: Any) -> bool:
    return value.dtype.is_floating_point if isinstance(value, torch.Tensor) else isinstance(value, torch.SymFloat)
