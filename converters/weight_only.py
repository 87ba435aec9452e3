"""Weights quantised alone: bytes and nibbles with a scale for each row or each group of a row.

They stay in torch's layout, rows of output features with scales along the row. In the transposed layout ONNX Runtime
fuses DequantizeLinear and MatMul and, by default, rounds the activations to bytes: errors of a few hundredths.
contrib/onnxplug-ort emits ONNX Runtime's own operator, with its accuracy stated.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import to_torch_dtype
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, FLOAT16
from onnxplug.converters.helpers.nibbles import SINCE, as_nibbles, nibble_dtype, pack
from onnxplug.converters.helpers.products import product
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_FLOATS = frozenset({FLOAT, FLOAT16, ir.DataType.BFLOAT16})


def _parameters(g: GraphBuilder, x: Value, dtype: ir.DataType, shape: list[Any]) -> Value:
    """Scales in a dtype and shape; stored scales are converted in the file."""
    if g.stored(x) is None:
        return g.reshape(g.cast(x, dtype), shape)
    kind = to_torch_dtype(dtype)
    return g.derive(
        x, lambda t: t.to(kind).reshape(shape).contiguous(), ("scales", dtype, tuple(shape)), form="reshaped"
    )


def dequantize_affine(g: GraphBuilder, node: FxNode) -> Value:
    """torchao's dequantize_affine: rows, or groups of a row, of a weight of bytes, each with its scale and zero point.

    By DequantizeLinear, by blocks since opset 21. Since then, 4-bit integers that torchao keeps in bytes are stored in
    4 bits.
    """
    x, block, scale, zero = node.args[:4]
    fits = len(block) == 2 and block[0] == 1 and x.dtype in (ir.DataType.INT8, ir.DataType.UINT8)
    if not fits or scale.dtype != node.dtype or rank_of(x) != 2 or node.dtype not in _FLOATS:
        raise Decline("another layout than rows or groups of bytes, or a dtype of its own for the scales")
    rows, columns = g.dims(x)
    if not isinstance(columns, int) or not isinstance(block[1], int) or not block[1]:
        raise Decline("rows of dynamic length, or empty ones")
    by_row = block[1] == columns
    if g.opset < SINCE and not by_row:
        raise Decline("blocks need opset 21 or later")
    shape: list[Any] = [-1] if by_row else [rows, columns // block[1]]
    weight, zeros = _nibbles(g, node, shape)
    if weight is None:
        if node.dtype != FLOAT:  # torch rounds the difference of two 8-bit integers
            raise Decline("bytes in another dtype than float")
        weight, zeros = x, None if zero is None else g.reshape(g.cast(zero, x.dtype), shape)
    # Products of nibbles and bfloat16 are exact in float.
    inner = computed_in(g, "DequantizeLinear", node.dtype)
    layout = {"axis": 0} if by_row else {"axis": 1, "block_size": block[1]}
    return g.cast(g.op.DequantizeLinear(weight, _parameters(g, scale, inner, shape), zeros, **layout), node.dtype)


def _nibbles(g: GraphBuilder, node: FxNode, shape: list[Any]) -> tuple[Value | None, Value | None]:
    """The weight and its zero points in four bits, where they are stored and fit."""
    x, _, _, zero, _, low, high = node.args[:7]
    dtype = nibble_dtype(low, high)
    if dtype is None or g.opset < SINCE:
        return None, None
    weight = as_nibbles(g, x, dtype, lambda t: t, "as it is")
    if zero is None or weight is None:
        return weight, None
    zeros = as_nibbles(g, zero, dtype, lambda t: t.reshape(shape), f"as {shape}")
    return (weight, zeros) if zeros is not None else (None, None)


def byte_weights(g: GraphBuilder, node: FxNode) -> Value:
    """_weight_int8pack_mm(Tensor self, Tensor mat2, Tensor scales) -> Tensor

    The weights are rows of output features, each with its scale.
    """
    x, weight, scales = node.args
    if node.dtype == DOUBLE:
        multiplied = product(g, x, g.op.Transpose(g.cast(weight, DOUBLE), perm=[1, 0]))
        return g.op.Mul(multiplied, g.cast(scales, DOUBLE))
    restored = g.op.DequantizeLinear(weight, _parameters(g, scales, FLOAT, [g.dim(weight, 0)]), axis=0)
    return g.cast(product(g, g.cast(x, FLOAT), g.op.Transpose(restored, perm=[1, 0])), node.dtype)


# -- torch's packed nibbles --------------------------------------------------------------------------------------------


def nibble_weights(g: GraphBuilder, node: FxNode) -> Value:
    """_weight_int4pack_mm_for_cpu(Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros) -> Tensor

    ``(q - 8) * scale + zero``, in float whatever the dtype, as torch's kernels compute it.
    """
    x, packed, group, parameters = node.args
    if g.stored(packed) is None or g.stored(parameters) is None:
        raise Unsupported(
            "4-bit weights in torch's packed layout, which differs from processor to processor, and which are no parameter "
            "or buffer of the model",
            hint="Export the model before its weights are packed, or with the packed ones as a buffer.",
        )
    restored = restored_nibbles(g, packed, group, parameters)
    return g.cast(product(g, g.cast(x, FLOAT), g.op.Transpose(restored, perm=[1, 0])), node.dtype)


def restored_nibbles(g: GraphBuilder, packed: Value, group: int, parameters: Value) -> Value:
    """The weight of packed nibbles, [out, in], in float."""
    rows, half = g.concrete_shape(packed)
    columns = 2 * half
    scales = g.derive(parameters, lambda t: t[:, :, 0].t().float().contiguous(), "packed scales", form="scales")
    zeros = g.derive(parameters, lambda t: t[:, :, 1].t().float().contiguous(), "packed zeros", form="zero_points")
    blocks = [rows, columns // group, group]
    if g.opset >= SINCE:
        levels = g.derive(
            packed,
            lambda t: pack(unpacked(t).to(torch.int8) - 8, ir.DataType.INT4),
            "unpacked nibbles",
            form="unpacked",
        )
        result = g.op.DequantizeLinear(levels, scales, axis=1, block_size=group)
        result = g.reshape(result, blocks)
    else:
        levels = g.derive(
            packed, lambda t: (unpacked(t).to(torch.int8) - 8).reshape(blocks), "unpacked bytes", form="unpacked"
        )
        result = g.op.Mul(g.cast(levels, FLOAT), g.op.Unsqueeze(scales, [2]))
    return g.reshape(g.op.Add(result, g.op.Unsqueeze(zeros, [2])), [rows, columns])


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The integers, [out, in], of a weight that ``_convert_weight_to_int4pack_for_cpu`` packed on this machine.

    Raises:
        Unsupported: Packed again, they are something else.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    # Processors pack a few rows at a time, alike in each block; otherwise the whole matrix is one block.
    for block in (64, rows):
        if rows % block:
            continue
        levels = torch.zeros(rows // block, block * columns, dtype=torch.uint8)
        levels[:, _places(block, columns)] = _halves(packed).reshape(rows // block, -1)
        levels = levels.reshape(rows, columns)
        if torch.equal(_packed(levels.int()), packed):
            return levels
    raise Unsupported("4-bit weights that were packed in another way than torch packs them on this machine")


def _places(rows: int, columns: int) -> torch.Tensor:
    """The element of a matrix at each place of the packed matrix: element numbers are packed, four bits at a time."""
    number = torch.arange(rows * columns)
    place = torch.zeros_like(number)
    for shift in range(0, max(number.numel() - 1, 1).bit_length(), 4):
        digits = (number >> shift & 15).int().reshape(rows, columns)
        place |= _halves(_packed(digits)).long() << shift
    return place


def _packed(levels: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks both nibbles of every byte, the low nibble first."""
    return torch.stack([packed & 15, packed >> 4], -1).reshape(-1)


def packed_nibbles(g: GraphBuilder, node: FxNode) -> Value:
    """_weight_int4pack_mm(Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros) -> Tensor"""
    raise Unsupported(
        "4-bit weights in the packed layout of a GPU",
        hint="Export the model before its weights are packed.",
    )


RULES: list[Rule] = [
    Rule("torchao::dequantize_affine.default", dequantize_affine),
    Rule("aten::_weight_int8pack_mm.default", byte_weights),
    Rule("aten::_weight_int4pack_mm_for_cpu.default", nibble_weights),
    Rule("aten::_weight_int4pack_mm.default", packed_nibbles),
]
