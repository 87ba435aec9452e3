"""Weights of 4 bits: converters.

Two weights are in a byte, the first in its high half; each is an index into a code of 16 numbers, and a block of
``blocksize`` weights, counted through the rows, shares the factor ``absmax``. Double quantisation stores the factors,
less a common offset, in bytes, too: indices into a code of 256 numbers, with a second factor for each 256 factors.
"""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir
import torch

from onnxplug import Unsupported

_FLOAT = ir.DataType.FLOAT
_TYPES = {"fp4": 0, "nf4": 1}
#: How many factors share a second factor in double quantisation.
_FACTORS = 256
#: The largest block of ONNX Runtime's kernel.
_LARGEST = 256


def gemm_4bit(g: Any, node: Any) -> Any:
    """gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor

    The weights are rounded to the dtype of A, as bitsandbytes does.
    """  # noqa: E501
    x, packed, shape, _, size, kind, bias, *_ = node.args
    return _plain(g, x, packed, _factors(g, node), (shape, size, kind), bias)


def gemm_4bit_packed(g: Any, node: Any) -> Any:
    """gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor

    MatMulBnb4 takes the bytes in the same order, and its codes are the same numbers.
    """  # noqa: E501
    x, packed, shape, _, size, kind, bias, *_ = node.args
    return _fused(g, x, packed, _factors(g, node), (shape, size, kind), bias)


def gemv_4bit(g: Any, node: Any) -> Any:
    """gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor"""
    x, packed, shape, absmax, code, size = node.args
    return _plain(g, x, packed, absmax, (shape, size, _kind(g, code)), None)


def gemv_4bit_packed(g: Any, node: Any) -> Any:
    """gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor"""
    x, packed, shape, absmax, code, size = node.args
    return _fused(g, x, packed, absmax, (shape, size, _kind(g, code)), None)


def dequantize_4bit(g: Any, node: Any) -> Any:
    """dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor"""
    packed, absmax, size, kind, shape, _ = node.args
    return g.cast(_weights(g, packed, absmax, (shape, size, kind)), node.dtype)


def dequantize_blockwise(g: Any, node: Any) -> Any:
    """dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor"""
    places, absmax, code, size, _ = node.args
    shape = g.concrete_shape(places)
    numbers = g.op.Gather(code, g.cast(g.op.Reshape(places, g.const([-1])), ir.DataType.INT32))
    return g.cast(g.op.Reshape(_scaled(g, numbers, absmax, size, prod(shape)), g.const(shape)), node.dtype)


def _plain(g: Any, x: Any, packed: Any, absmax: Any, how: tuple[Any, int, str], bias: Any) -> Any:
    """The product in float with the restored weights."""
    weights = g.cast(g.cast(_weights(g, packed, absmax, how), x.dtype), _FLOAT)
    result = g.op.MatMul(g.cast(x, _FLOAT), g.op.Transpose(weights, perm=[1, 0]))
    return _biased(g, result, bias, x.dtype)


def _fused(g: Any, x: Any, packed: Any, absmax: Any, how: tuple[Any, int, str], bias: Any) -> Any:
    """The product by MatMulBnb4, whose kernel on the CPU takes float; a larger block becomes several of its largest."""
    (rows, columns), size, kind = how
    wide = g.cast(x, _FLOAT)
    if size > _LARGEST:
        count = -(-rows * columns // _LARGEST)
        absmax = _spread(g, absmax, size // _LARGEST, count)
    result = g.domain("com.microsoft").MatMulBnb4(
        wide, _bytes(g, packed), absmax, K=columns, N=rows, block_size=min(size, _LARGEST), quant_type=_TYPES[kind]
    )
    result.type = ir.TensorType(_FLOAT)
    result.shape = ir.Shape([*x.shape[:-1], rows])
    return _biased(g, result, bias, x.dtype)


def _biased(g: Any, result: Any, bias: Any, dtype: Any) -> Any:
    return g.cast(result if bias is None else g.op.Add(result, g.cast(bias, _FLOAT)), dtype)


def _factors(g: Any, node: Any) -> Any:
    """One factor a block, restored from bytes after double quantisation.

    They are computed in the model, so that the file holds the bytes; ONNX Runtime does so once, as it loads the file.
    """
    absmax, (places, code, offset) = node.args[3], node.args[7:10]
    if places is None:
        return absmax
    (count,) = g.concrete_shape(places)
    numbers = g.op.Gather(code, g.cast(places, ir.DataType.INT32))
    return g.op.Add(_scaled(g, numbers, absmax, _FACTORS, count), offset)


def _weights(g: Any, packed: Any, absmax: Any, how: tuple[Any, int, str]) -> Any:
    """The weights in float: a byte is an index into a table of pairs."""
    shape, size, kind = how
    count = prod(shape)
    pairs = g.op.Gather(g.const(_pairs(kind)), g.cast(_bytes(g, packed), ir.DataType.INT32))
    numbers = g.op.Reshape(pairs, g.const([-1]))
    if count % 2:
        numbers = _first(g, numbers, count)
    return g.op.Reshape(_scaled(g, numbers, absmax, size, count), g.const(list(shape)))


def _pairs(kind: str) -> torch.Tensor:
    """[256, 2]: the two numbers of each byte."""
    from bitsandbytes.functional import get_4bit_type

    code, byte = get_4bit_type(kind, device="cpu"), torch.arange(256)
    return torch.stack((code[byte >> 4], code[byte & 15]), 1)


def _bytes(g: Any, packed: Any) -> Any:
    if packed.dtype != ir.DataType.UINT8:
        raise Unsupported(
            f"packed weights in {packed.dtype}", hint="View them as uint8: quant_storage=torch.uint8 is the default."
        )
    return packed if len(packed.shape) == 1 else g.op.Reshape(packed, g.const([-1]))


def _scaled(g: Any, numbers: Any, absmax: Any, size: int, count: int) -> Any:
    """Numbers times the factors of their blocks; the last block may be shorter."""
    if count % size:
        return g.op.Mul(numbers, _spread(g, absmax, size, count))
    blocks = g.op.Reshape(numbers, g.const([-1, size]))
    return g.op.Reshape(g.op.Mul(blocks, g.op.Reshape(absmax, g.const([-1, 1]))), g.const([-1]))


def _spread(g: Any, factors: Any, times: int, count: int) -> Any:
    """Each factor ``times`` times, the first ``count`` elements of the result."""
    (have,) = g.concrete_shape(factors)
    rows = g.op.Expand(g.op.Reshape(factors, g.const([-1, 1])), g.const([have, times]))
    flat = g.op.Reshape(rows, g.const([-1]))
    return flat if have * times == count else _first(g, flat, count)


def _first(g: Any, x: Any, count: int) -> Any:
    return g.op.Slice(x, g.const([0]), g.const([count]), g.const([0]))


def _kind(g: Any, code: Any) -> str:
    """The name of a code, which its second number decides."""
    numbers = g.stored(code)
    if numbers is None:
        raise Unsupported("a code that is known at run time only")
    return "fp4" if numbers[1] > 0 else "nf4"
