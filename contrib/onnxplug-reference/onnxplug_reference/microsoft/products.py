"""Matrix products of com.microsoft: fused products, and products of quantised matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import microsoft
from onnxplug_reference.numeric import sigmoid, typed


def fused_matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> np.ndarray:
    """alpha A B. ``transA`` swaps the last two axes of A; ``transBatchA`` first moves axis 0 behind the batch axes."""
    left = _arranged(a, bool(transA), bool(transBatchA))
    right = _arranged(b, bool(transB), bool(transBatchB))
    return typed(np.float32(alpha) * (left @ right), a)


def _arranged(x: np.ndarray, swapped: bool, batch: bool) -> np.ndarray:
    if batch and x.ndim > 2:
        x = np.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if swapped and x.ndim > 1 else x


def transpose_matmul(
    a: np.ndarray, b: np.ndarray, *, alpha: float = 1.0, transA: int = 0, transB: int = 0
) -> np.ndarray:
    """FusedMatMul under its former name."""
    return fused_matmul(a, b, alpha=alpha, transA=transA, transB=transB)


#: Activations that FusedGemm and FusedConv apply to their result, functions of x and their parameters.
_ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {
    "": lambda x: x,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": sigmoid,
    "Tanh": np.tanh,
    "LeakyRelu": lambda x, alpha=0.01: np.where(x >= 0, x, alpha * x),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    "Clip": lambda x, low=-np.inf, high=np.inf: np.clip(x, low, high),
}


def _activated(x: np.ndarray, name: str, parameters: Sequence[float | None]) -> np.ndarray:
    if name not in _ACTIVATIONS:
        raise EvaluationError(f"unknown activation {name!r}; there are {', '.join(filter(None, _ACTIVATIONS))}")
    return typed(_ACTIVATIONS[name](x, *(p for p in parameters if p is not None)), x)


def fused_gemm(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> np.ndarray:
    """An activation of alpha A B + beta C."""
    result = np.float32(alpha) * ((a.T if transA else a) @ (b.T if transB else b))
    if c is not None:
        result = result + np.float32(beta) * c
    return _activated(typed(result, a), activation, (activation_alpha, activation_beta, activation_gamma))


def fused_conv(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    z: np.ndarray | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    """An activation of the sum of a convolution and z."""
    from onnx.reference.ops.op_conv import _conv_implementation

    result = _conv_implementation(x, w, b, auto_pad, dilations, group, kernel_shape or w.shape[2:], pads, strides)
    return _activated(typed(result if z is None else result + z, x), activation, list(activation_params))


def unpacked(blob: np.ndarray, bits: int) -> np.ndarray:
    """Integers of ``bits`` bits, unpacked from bytes along the last axis, the lowest bits first."""
    if bits not in (1, 2, 4, 8):
        raise EvaluationError(f"integers of {bits} bits; there are kernels for 2, 4 and 8")
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    return ((blob[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*blob.shape[:-1], blob.shape[-1] * each)


def matmul_nbits(
    a: np.ndarray,
    b: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    g_idx: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> np.ndarray:
    """A times a matrix [N, K] of integers in blocks along K: (integer - zero point) * scale.

    Args:
        a: [..., K].
        b: [N, blocks, block_size * bits / 8] bytes.
        scales: [N, blocks].
        zero_points: Packed bytes [N, ceil(blocks * bits / 8)], or [N, blocks] of A's type; 2^(bits - 1) when absent.
        g_idx: The block of each of the K columns.
        bias: [N].
    """
    if weight_prepacked:
        raise EvaluationError(
            "the weight is packed for one GPU's kernel (weight_prepacked); only ONNX Runtime reads it"
        )
    blocks = -(-K // block_size)
    codes = unpacked(b.reshape(N, blocks, -1), bits).astype(np.float32)
    scale = scales.reshape(N, blocks).astype(np.float32)
    zero: np.ndarray | float = float(2 ** (bits - 1))
    if zero_points is not None and zero_points.dtype == np.uint8:
        zero = unpacked(zero_points.reshape(N, -1), bits)[:, :blocks].astype(np.float32)
    elif zero_points is not None:
        zero = zero_points.reshape(N, blocks).astype(np.float32)
    if g_idx is None:
        zeros = zero if isinstance(zero, float) else zero[..., None]
        weight = ((codes - zeros) * scale[..., None]).reshape(N, -1)[:, :K]
    else:
        flat, group = codes.reshape(N, -1)[:, :K], g_idx.reshape(-1)[:K]
        weight = (flat - (zero if isinstance(zero, float) else zero[:, group])) * scale[:, group]
    result = a @ weight.T
    return typed(result if bias is None else result + bias, a)


def matmul_integer_to_float(
    a: np.ndarray,
    b: np.ndarray,
    a_scale: np.ndarray,
    b_scale: np.ndarray,
    a_zero_point: np.ndarray | None = None,
    b_zero_point: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """(A - zero point) (B - zero point), scaled by both; B's scale and zero point are for the whole or each column."""
    left = a.astype(np.int64) - (0 if a_zero_point is None else a_zero_point.astype(np.int64))
    right = b.astype(np.int64) - (0 if b_zero_point is None else b_zero_point.astype(np.int64))
    result = (left @ right).astype(np.float32) * (a_scale * b_scale)
    return typed(result if bias is None else result + bias, a_scale)


def dynamic_quantize_matmul(
    a: np.ndarray,
    b: np.ndarray,
    b_scale: np.ndarray,
    b_zero_point: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """:func:`matmul_integer_to_float` with A quantised to uint8 over its whole range, zero included."""
    low, high = min(float(a.min(initial=0)), 0.0), max(float(a.max(initial=0)), 0.0)
    scale = np.float32((high - low) / 255) if high > low else np.float32(1)
    zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
    codes = np.clip(np.rint(a / scale) + zero, 0, 255).astype(np.uint8)
    return matmul_integer_to_float(codes, b, np.asarray(scale), b_scale, np.asarray(zero), b_zero_point, bias)


def gather_block_quantized(
    data: np.ndarray,
    indices: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> np.ndarray:
    """Slices of a tensor quantised in blocks along an axis, (integer - zero point) * scale; 0 for an index outside."""
    packed = data.dtype == np.uint8
    codes = unpacked(data, bits) if packed else data
    axis = quantize_axis % codes.ndim
    places = np.arange(codes.shape[axis]) // block_size if block_size else np.zeros(codes.shape[axis], np.int64)
    values = codes.astype(np.float32)
    if zero_points is not None:
        zeros = unpacked(zero_points, bits) if packed else zero_points
        zeros = np.take(zeros.astype(np.float32), np.arange(scales.shape[axis]), axis)
        values = values - np.take(zeros, places, axis)
    elif packed:
        values = values - float(2 ** (bits - 1))
    values = values * np.take(scales.astype(np.float32), places, axis)
    along = gather_axis % codes.ndim
    size = codes.shape[along]
    wrapped = np.where(indices < 0, indices + size, indices)
    inside = (wrapped >= 0) & (wrapped < size)
    taken = np.take(values, np.where(inside, wrapped, 0), along)
    shape = [1] * along + list(indices.shape) + [1] * (codes.ndim - along - 1)
    return typed(np.where(inside.reshape(shape), taken, 0), scales)


KERNELS = [
    microsoft("FusedMatMul", fused_matmul),
    microsoft("TransposeMatMul", transpose_matmul),
    microsoft("FusedGemm", fused_gemm),
    microsoft("FusedConv", fused_conv),
    microsoft("MatMulNBits", matmul_nbits),
    microsoft("MatMulIntegerToFloat", matmul_integer_to_float),
    microsoft("DynamicQuantizeMatMul", dynamic_quantize_matmul),
    microsoft("GatherBlockQuantized", gather_block_quantized, widen=False),
]
