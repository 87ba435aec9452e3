"""Quantised graphs in forms that ONNX Runtime keeps right.

ONNX Runtime 1.31 fuses DequantizeLinear, an operator and QuantizeLinear into integer kernels. Where the fused kernel is wrong,
does not load or does not run, the numbers are restored by arithmetic (a Cast, a difference and a product) instead, which it
does not fuse; on constants it folds the arithmetic when it loads the model. ``tests/rewrite/test_quantised.py`` shows each fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import attribute_values, int_attribute, is_op, made_by, only_reader, reads, used_once
from onnxplug.build.quantized import REDUCED
from onnxplug.build.scope import graphs_of
from onnxplug.rewrites.onnxruntime import consumers, workaround

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

#: Operators that ONNX Runtime moves a DequantizeLinear past, or removes (the Cast of a half, for which it has no kernel).
_MOVES = ("Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "MaxPool")
#: How many nodes are visited, at most, to show that a value depends on no input.
_MOST_NODES = 64


def _is_constant(value: ir.Value) -> bool:
    """Whether a value depends on no input of the graph: ONNX Runtime folds it when it loads the model."""
    pending, seen = [value], {value}
    while pending and len(seen) <= _MOST_NODES:
        current = pending.pop()
        node = current.producer()
        if node is None:
            if current.is_graph_input():
                return False
            continue
        known = [v for v in node.inputs if v is not None]
        if not known or any(True for _ in graphs_of(node)):
            return False
        pending += [v for v in known if v not in seen]
        seen.update(known)
    return not pending


def _restored(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """The result of a ``DequantizeLinear`` by arithmetic; ``None`` for scales by block, which ONNX Runtime does not fuse."""
    x, scale, zero = [*node.inputs, None][:3]
    dtype, shape, parameters = node.outputs[0].dtype, node.outputs[0].shape, dims_of(scale)
    assert x is not None and scale is not None
    if dtype is None or shape is None or parameters is None or int_attribute(node, "block_size", 0):
        return None
    trailing = len(shape) - 1 - int_attribute(node, "axis", 1) % len(shape) if parameters and shape else 0

    def along(v: ir.Value) -> ir.Value:
        return g.reshape(v, [-1, *[1] * trailing]) if trailing else v

    levels, known = g.cast(x, dtype), g.constant(zero)
    if zero is not None and (known is None or known.any()):
        levels = g.op.Sub(levels, along(g.cast(zero, dtype)))
    result: ir.Value = g.op.Mul(levels, along(scale))
    return result


def _behind(value: ir.Value | None) -> tuple[ir.Node | None, list[ir.Node]]:
    """The ``DequantizeLinear`` behind a value that is moved about, and the nodes that move it, the last first."""
    moves: list[ir.Node] = []
    while (move := made_by(value, *_MOVES)) is not None:
        moves.append(move)
        value = move.inputs[0]
    return made_by(value, "DequantizeLinear"), moves


def _is_scalar(value: ir.Value | None) -> bool:
    return dims_of(value) == ()


def _by_column(node: ir.Node, moves: list[ir.Node]) -> bool:
    """Whether a restored and moved matrix has a single scale, or a scale for each of its columns."""
    shape = dims_of(node.outputs[0])
    if _is_scalar(node.inputs[1]):
        return True
    if shape is None or len(shape) != 2:
        return False
    axis = int_attribute(node, "axis", 1) % 2
    for move in reversed(moves):
        if move.op_type == "Cast":
            continue
        if move.op_type != "Transpose" or "perm" not in move.attributes:
            return False
        axis = list(move.attributes["perm"].as_ints()).index(axis)
    return axis == 1


def _is_quantised(node: ir.Node, moves: list[ir.Node]) -> bool:
    """Whether a restored and moved value surely counts as quantised for ONNX Runtime.

    It moves a DequantizeLinear past other nodes where its scale is a constant number.
    """
    if not moves:
        return True
    pushed = not any(move.op_type == "Cast" for move in moves)
    return pushed and _has_constant_scale(node) and used_once(node.outputs[0])


def _has_constant_scale(node: ir.Node) -> bool:
    scale = node.inputs[1]
    return scale is not None and _is_scalar(scale) and _is_constant(scale)


def _right_is_restored(node: ir.Node) -> bool:
    return _behind(node.inputs[1])[0] is not None


def _left_is_restored(node: ir.Node) -> bool:
    return _behind(node.inputs[0])[0] is not None


def restored_weight(g: GraphBuilder, node: ir.Node) -> Mapping[ir.Value, ir.Value] | None:
    """A ``MatMul`` of a constant that DequantizeLinear restores with numbers that are not quantised.

    ONNX Runtime turns it into a MatMulNBits, which rounds the other operand to bytes. With quantised numbers it makes an integer
    product, which fails for scales along another axis than the columns.
    """
    restoring, moves = _behind(node.inputs[1])
    if restoring is None or restoring.graph is not node.graph:
        return None
    other, other_moves = _behind(node.inputs[0])
    value = restoring.inputs[0]
    alone = other is None or other.graph is not node.graph or not _is_quantised(other, other_moves)
    rounded = alone and value is not None and _is_constant(value)
    fails = other is not None and not _by_column(restoring, moves)
    result = _restored(g, restoring) if rounded or fails else None
    return None if result is None else {restoring.outputs[0]: result}


def bias_of_all_axes(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """The bias of a product of quantised numbers whose scale is computed has as many axes as the product.

    ONNX Runtime turns a MatMul of more than two axes and a bias of one axis into a Gemm, and reshapes the first operand for it.
    A DequantizeLinear of a computed scale stays before that Reshape, and the Gemm becomes a MatMulNBits, which rounds its
    operand to bytes again.
    """
    products = [(made_by(value, "MatMul"), bias) for value, bias in zip(node.inputs, node.inputs[::-1], strict=True)]
    for product, bias in products:
        axes = dims_of(node.outputs[0])
        if product is None or bias is None or axes is None or len(axes) < 3 or len(dims_of(bias) or ()) != 1:
            continue
        quantised = made_by(product.inputs[0], "DequantizeLinear")
        if quantised is not None and not _has_constant_scale(quantised) and _right_is_restored(product):
            result: ir.Value = g.op.Add(product.outputs[0], g.reshape(bias, [*[1] * (len(axes) - 1), -1]))
            return result
    return None


def _leads_to_quantisation(node: ir.Node) -> bool:
    """Whether single readers lead from the result to a QuantizeLinear, past Relu, Clip and nodes that move elements.

    A MatMul's bias comes first.
    """
    value = node.outputs[0]
    if node.op_type == "MatMul":
        add = only_reader(value, "Add")
        if add is None or not all(v is value or (v is not None and _is_constant(v)) for v in add.inputs):
            return False
        value = add.outputs[0]
    while (reader := only_reader(value, "QuantizeLinear", "Relu", "Clip", *_MOVES)) is not None:
        if reader.op_type == "QuantizeLinear":
            return True
        value = reader.outputs[0]
    return False


def quantised_operands(g: GraphBuilder, node: ir.Node) -> ir.Value | Mapping[ir.Value, ir.Value] | None:
    """A convolution, or a product and a bias, between quantised numbers whose weight is not quantised, or not by row.

    ONNX Runtime quantises a constant weight in floating point by itself. Its integer convolution fails for scales along
    another axis than the output channels.
    """
    x, weight, *bias = node.inputs
    (restoring, moves), (of_weight, weight_moves) = _behind(x), _behind(weight)
    if restoring is None or restoring.graph is not node.graph or weight is None or not _leads_to_quantisation(node):
        return None
    if of_weight is not None:
        moved = any(move.op_type != "Cast" for move in weight_moves)
        by_row = _is_scalar(of_weight.inputs[1]) or (not moved and int_attribute(of_weight, "axis", 1) == 0)
        if node.op_type != "Conv" or by_row or of_weight.graph is not node.graph:
            return None
        result = _restored(g, of_weight)
        return None if result is None else {of_weight.outputs[0]: result}
    plain = _restored(g, restoring) if _is_scalar(restoring.inputs[1]) and _is_constant(weight) else None
    if plain is None:
        return None
    if moves:
        return {restoring.outputs[0]: plain}
    replacement: ir.Value = getattr(g.op, node.op_type)(plain, weight, *bias, **attribute_values(node))
    return replacement


def _only_dequantised(g: GraphBuilder, value: ir.Value, zero: np.ndarray | None) -> bool:
    """Whether only DequantizeLinear nodes with this zero point read a quantised value."""
    readers = consumers(value)
    if zero is None or value.is_graph_output() or not readers:
        return False
    for reader in readers:
        other = g.constant(reader.inputs[2]) if len(reader.inputs) > 2 else None
        if not is_op(reader, "DequantizeLinear") or other is None or not np.array_equal(other, zero):
            return False
    return True


def _zero_point(g: GraphBuilder, node: ir.Node) -> np.ndarray | None:
    """The zero point of a QuantizeLinear or DequantizeLinear, where it is known."""
    return g.constant(node.inputs[2]) if len(node.inputs) > 2 else None


def _as_unsigned(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.int16) + 128).astype(np.uint8)


def unsigned_bytes(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``DequantizeLinear`` of int8 as ``DequantizeLinear`` of uint8, with its zero point 128 higher.

    From opset 21 on ONNX Runtime repeats it behind a Transpose, Slice, MaxPool and the like without its zero point, and then
    assumes uint8: the model does not load.
    """
    value, zero = node.inputs[0], _zero_point(g, node)
    if value is None or value.dtype != ir.DataType.INT8 or zero is None or zero.size != 1:
        return None
    moved = g.const(_as_unsigned(zero))
    bytes_ = _quantised_unsigned(g, value, zero, moved)
    if bytes_ is None:
        if _is_constant(value) or not any(is_op(reader, *_MOVES) for reader in consumers(node.outputs[0])):
            return None
        bytes_ = _unsigned(g, value)
    result: ir.Value = g.op.DequantizeLinear(bytes_, node.inputs[1], moved, **attribute_values(node))
    return result


def _quantised_unsigned(g: GraphBuilder, value: ir.Value, zero: np.ndarray | None, moved: ir.Value) -> ir.Value | None:
    """The ``QuantizeLinear`` that makes a value, maybe with a Clip after it, in uint8; ``None`` if other nodes read it."""
    clip = made_by(value, "Clip")
    quantise = made_by(clip.inputs[0] if clip is not None else value, "QuantizeLinear")
    if quantise is None or zero is None or not _only_dequantised(g, value, zero):
        return None
    if clip is not None and not used_once(clip.inputs[0]):
        return None
    bounds = [g.constant(bound) for bound in clip.inputs[1:]] if clip is not None else []
    if any(bound is None for bound in bounds) or not np.array_equal(zero, np.asarray(_zero_point(g, quantise))):
        return None
    kept = {name: value for name, value in attribute_values(quantise).items() if name != "output_dtype"}
    result: ir.Value = g.op.QuantizeLinear(quantise.inputs[0], quantise.inputs[1], moved, **kept)
    if clip is not None:
        result = g.op.Clip(result, *(g.const(_as_unsigned(bound)) for bound in bounds if bound is not None))
    return result


def unsigned_second_operand(g: GraphBuilder, node: ir.Node) -> Mapping[ir.Value, ir.Value] | None:
    """A convolution or a product of two quantised operands, the second of which is int8: it is stored as uint8, 128 higher.

    ONNX Runtime's kernels for uint8 and int8, which it also uses for int8 and int8, add up pairs of products in 16 bits on x86
    processors without VNNI, which saturate. The kernels for uint8 and uint8 do not, in about 1.4 times the time. PyTorch's kernels
    for x86 saturate alike, which is why it quantises for them to 7 bits: products of 7-bit numbers are left as they are.
    """
    (first, _), (second, _) = _behind(node.inputs[0]), _behind(node.inputs[1])
    if first is None or second is None or second.graph is not node.graph:
        return None
    if (
        first.outputs[0].meta.get(REDUCED)
        and first.inputs[0] is not None
        and first.inputs[0].dtype == ir.DataType.UINT8
    ):
        return None  # products of two pairs stay below 2**15
    x, scale, zero = [*second.inputs, None][:3]
    parameters = dims_of(scale)
    if x is None or scale is None or x.dtype != ir.DataType.INT8 or parameters is None:
        return None
    if first.inputs[0] is not None and _is_constant(first.inputs[0]) and _is_constant(x):
        return None
    if zero is None and not all(isinstance(size, int) for size in parameters):
        return None
    moved = g.const(np.full(parameters, 128, np.uint8)) if zero is None else _unsigned(g, zero)
    bytes_ = _quantised_unsigned(g, x, _zero_point(g, second), moved) or _unsigned(g, x)
    return {second.outputs[0]: g.op.DequantizeLinear(bytes_, scale, moved, **attribute_values(second))}


def _unsigned(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """An int8 value as uint8, 128 higher."""
    known = g.constant(x)
    if known is not None:
        return g.const(_as_unsigned(known))
    if g.is_weight(x):
        return g.derive(x, lambda tensor: (tensor.short() + 128).byte(), ("unsigned",), form="unsigned")
    result: ir.Value = g.cast(
        g.op.Add(g.cast(x, ir.DataType.INT32), g.const(128, ir.DataType.INT32)), ir.DataType.UINT8
    )
    return result


_RANGE = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}


def second_rounding(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """Two pairs of QuantizeLinear and DequantizeLinear in a row: the second pair is computed by Round and Clip.

    ONNX Runtime replaces both pairs by a single pair of another scale, which rounds once.
    """
    quantise = node.inputs[0].producer() if node.inputs[0] is not None else None
    if quantise is None or not is_op(quantise, "QuantizeLinear"):
        return None
    before = quantise.inputs[0].producer() if quantise.inputs[0] is not None else None
    first = before.inputs[0].producer() if before is not None and before.inputs[0] is not None else None
    limits = _RANGE.get(quantise.outputs[0].dtype or ir.DataType.UNDEFINED)
    scales = [g.constant(one.inputs[1]) for one in (quantise, node)]
    if not is_op(before, "DequantizeLinear") or not is_op(first, "QuantizeLinear") or limits is None:
        return None
    if any(scale is None or scale.size != 1 for scale in scales) or not _only_dequantised(
        g, quantise.outputs[0], _zero_point(g, quantise)
    ):
        return None
    x = quantise.inputs[0]
    assert x is not None and x.dtype is not None
    point: Any = g.const(np.asarray(g.constant(quantise.inputs[2])).reshape(()).astype(np.float64), x.dtype)
    step, factor = (g.const(np.asarray(scale).reshape(()), x.dtype) for scale in scales)
    low, high = (g.const(limit, x.dtype) for limit in limits)
    rounded = g.op.Clip(g.op.Add(g.op.Round(g.op.Div(x, step)), point), low, high)
    result: ir.Value = g.op.Mul(g.op.Sub(rounded, point), factor)
    return result


def _output_transposed(node: ir.Node) -> bool:
    """Whether a Transpose reads an output of the graph, and nothing but Transposes does."""
    value = node.inputs[0]
    producer = value.producer() if value is not None else None
    if value is None or producer is None or producer.graph is not node.graph or not value.is_graph_output():
        return False
    return all(is_op(reader, "Transpose") for reader in consumers(value))


def output_apart_from_quantisation(g: GraphBuilder, node: ir.Node) -> Mapping[ir.Value, ir.Value] | None:
    """An output of the graph that is quantised after a ``Transpose``, and that no other node reads, is a copy.

    ONNX Runtime moves QuantizeLinear before the Transpose, and then makes the quantised numbers the output.
    """
    value = node.inputs[0]
    assert value is not None
    pending, seen = [node], {node}
    while pending and len(seen) <= _MOST_NODES:
        for reader in consumers(pending.pop().outputs[0]):
            if is_op(reader, "QuantizeLinear"):
                return {value: g.scope.identity(value)}
            if reader not in seen and reader.graph is node.graph:
                seen.add(reader)
                pending.append(reader)
    return None


REWRITES = [
    workaround(
        "MatMul",
        restored_weight,
        "ONNX Runtime rounds to bytes what a restored weight is multiplied with",
        _right_is_restored,
    ),
    workaround(
        "Add",
        bias_of_all_axes,
        "ONNX Runtime reshapes the quantised operand for a Gemm, and rounds it to bytes again",
        reads("MatMul"),
    ),
    *(
        workaround(op, quantised_operands, "ONNX Runtime quantises the weight too", _left_is_restored)
        for op in ("Conv", "ConvTranspose", "Gemm", "MatMul")
    ),
    *(
        workaround(
            op,
            unsigned_second_operand,
            "ONNX Runtime's sums of uint8 times int8 saturate without VNNI",
            _right_is_restored,
        )
        for op in ("Conv", "Gemm", "MatMul")
    ),
    workaround(
        "Transpose",
        output_apart_from_quantisation,
        "ONNX Runtime makes the quantised numbers the output",
        _output_transposed,
    ),
    workaround("DequantizeLinear", second_rounding, "ONNX Runtime replaces two quantisations by one"),
    workaround("DequantizeLinear", unsigned_bytes, "ONNX Runtime repeats the pair without its zero point", since=21),
]
