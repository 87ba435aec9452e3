"""Forms that ONNX Runtime's own graph optimisations keep right.

Each rewrite here replaces a plain form that ONNX Runtime 1.31 turns into a wrong or invalid graph when its optimisations
are on, by one that computes the same and that it leaves alone. ``tests/rewrite/test_onnxruntime.py`` shows each fault in
the plain form: when a later version mends it, the test says so and the rewrite can go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import read_by, reads
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def _consumers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses()]


def _is(node: ir.Node | None, *op_types: str) -> bool:
    return node is not None and not node.domain and node.op_type in op_types


def pad_apart_from_pool(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``Pad`` with zeros before a pool pads a tensor of one more axis.

    ONNX Runtime makes such a Pad the pool's own padding. A MaxPool's own holds −∞ instead of 0: negative maxima at the border
    are wrong. Of either pool, padding as wide as the kernel does not load, and several Pads are added up.
    """
    x, pads, fill, axes = [*node.inputs, None, None][:4]
    readers = _consumers(node.outputs[0])
    if not any(_is(n, "AveragePool") or (_is(n, "MaxPool") and len(n.outputs) == 1) for n in readers):
        return None
    shape, widths = dims_of(x), g.constant(pads)
    value = g.constant(fill) if fill is not None else np.zeros(())
    mode = node.attributes.get("mode")
    if x is None or shape is None or widths is None or value is None or value.size != 1 or value.item() != 0:
        return None
    if mode is not None and mode.as_string() != "constant":
        return None
    chosen: np.ndarray | None = np.arange(len(shape)) if axes is None else g.constant(axes)
    if chosen is None:
        return None
    before, after = np.split(widths, 2)
    whole = np.zeros((2, len(shape) + 1), np.int64)
    whole[:, chosen % len(shape) + 1] = [before, after]
    axis = g.const(np.zeros(1, np.int64))
    wide = g.op.Pad(g.op.Unsqueeze(x, axis), g.const(whole.reshape(-1)), fill)
    result: ir.Value = g.op.Squeeze(wide, axis)
    return result


def _scale_of(g: GraphBuilder, value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """``(x, factor)`` of a value that is ``x`` times or divided by a constant number."""
    node = value.producer() if value is not None else None
    if node is None or not _is(node, "Mul", "Div"):
        return None
    pairs = [node.inputs] if node.op_type == "Div" else [node.inputs, node.inputs[::-1]]
    for x, factor in pairs:
        number = g.constant(factor)
        if x is None or number is None or number.size != 1 or x.shape is None or number.ndim > len(x.shape):
            continue
        scale = float(number.item())
        if node.op_type == "Div" and scale == 0:
            continue
        return x, scale if node.op_type == "Mul" else 1 / scale
    return None


def one_scale_before_matmul(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A number times a number times ``x`` before a ``MatMul``, where ``x`` times the first is read elsewhere too.

    ONNX Runtime folds both numbers into the product and removes the inner node, which is still read: the model does not
    load. The one number is the product of both in double precision.
    """
    result = node.outputs[0]
    if result.dtype not in _FLOATS or not any(_feeds_matmul(n) for n in _consumers(result)):
        return None
    outer = _scale_of(g, result)
    inner = _scale_of(g, outer[0]) if outer is not None else None
    if outer is None or inner is None:
        return None
    scaled: ir.Value = g.op.Mul(inner[0], g.const(outer[1] * inner[1], result.dtype))
    return scaled


def _feeds_matmul(node: ir.Node) -> bool:
    """Whether a node is a product, or only transposes or scales for one."""
    seen = [node]
    while seen:
        current = seen.pop()
        if _is(current, "MatMul"):
            return True
        if _is(current, "Transpose", "Mul", "Div"):
            seen.extend(_consumers(current.outputs[0]))
    return False


def _only_dequantised(g: GraphBuilder, node: ir.Node) -> bool:
    """Whether only DequantizeLinear nodes, with the same zero point, read what a QuantizeLinear makes."""
    result = node.outputs[0]
    readers = _consumers(result)
    zero = g.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if zero is None or result.is_graph_output() or not readers:
        return False
    for reader in readers:
        other = g.constant(reader.inputs[2]) if len(reader.inputs) > 2 else None
        if not _is(reader, "DequantizeLinear") or other is None or not np.array_equal(other, zero):
            return False
    return True


def unsigned_bytes(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``DequantizeLinear(QuantizeLinear(x))`` through int8 goes through uint8, with its zero point 128 higher.

    From opset 21 on ONNX Runtime repeats such a pair behind a Transpose, Slice, MaxPool and the like without its zero
    point, whose type it then takes to be uint8: the model does not load.
    """
    inner = node.inputs[0].producer() if node.inputs[0] is not None else None
    if inner is None or not _is(inner, "QuantizeLinear") or inner.outputs[0].dtype != ir.DataType.INT8:
        return None
    zero = g.constant(inner.inputs[2]) if _only_dequantised(g, inner) else None
    if zero is None or zero.size != 1:
        return None
    moved = g.const((zero.astype(np.int16) + 128).astype(np.uint8))
    kept = {k: v.value for k, v in inner.attributes.items() if k != "output_dtype"}
    quantised = g.op.QuantizeLinear(inner.inputs[0], inner.inputs[1], moved, **kept)
    result: ir.Value = g.op.DequantizeLinear(
        quantised, node.inputs[1], moved, **{k: v.value for k, v in node.attributes.items()}
    )
    return result


_RANGE = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}


def second_rounding(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """Two pairs of QuantizeLinear and DequantizeLinear in a row: the second one is computed by Round and Clip.

    ONNX Runtime replaces both pairs by one of other scale, which rounds once.
    """
    quantise = node.inputs[0].producer() if node.inputs[0] is not None else None
    if quantise is None or not _is(quantise, "QuantizeLinear"):
        return None
    before = quantise.inputs[0].producer() if quantise.inputs[0] is not None else None
    first = before.inputs[0].producer() if before is not None and before.inputs[0] is not None else None
    limits = _RANGE.get(quantise.outputs[0].dtype or ir.DataType.UNDEFINED)
    scale = g.constant(node.inputs[1])
    if not _is(before, "DequantizeLinear") or not _is(first, "QuantizeLinear") or limits is None:
        return None
    if scale is None or scale.size != 1 or not _only_dequantised(g, quantise):
        return None
    x = quantise.inputs[0]
    assert x is not None and x.dtype is not None
    point: Any = g.const(np.asarray(g.constant(quantise.inputs[2])).reshape(()).astype(np.float64), x.dtype)
    factor = g.const(scale.reshape(()), x.dtype)
    low, high = (g.const(limit, x.dtype) for limit in limits)
    rounded = g.op.Clip(g.op.Add(g.op.Round(g.op.Div(x, factor)), point), low, high)
    result: ir.Value = g.op.Mul(g.op.Sub(rounded, point), factor)
    return result


def scatter_in_turn(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``ScatterND`` with a reduction is a ``ScatterElements`` of rows.

    ONNX Runtime's ScatterND adds slices in several threads at once, without a lock: slices that go to one place are lost now
    and then. Its ScatterElements goes through them one after the other.
    """
    reduction = node.attributes.get("reduction")
    x, index, updates = node.inputs
    shape, places = dims_of(x), dims_of(index)
    if reduction is None or reduction.as_string() == "none" or shape is None or not places:
        return None
    depth = places[-1]
    assert x is not None and index is not None and updates is not None
    if not isinstance(depth, int) or depth < 1:
        return None
    axis, one = g.const(0), g.const([-1])
    sizes = g.op.Shape(x)
    row: ir.Value | None = None
    for number in range(depth):
        size = g.op.Gather(sizes, g.const(number))
        place = g.op.Gather(index, g.const(number), axis=-1)
        place = g.op.Where(g.op.Less(place, axis), g.op.Add(place, size), place)
        row = place if row is None else g.op.Add(g.op.Mul(row, size), place)
    assert row is not None
    flat = g.op.Reshape(row, one)
    if depth == len(shape):
        data, source = g.op.Reshape(x, one), g.op.Reshape(updates, one)
    else:
        width = g.op.ReduceProd(g.op.Slice(sizes, g.const([depth]), g.const([len(shape)])), keepdims=1)
        rows = g.op.Concat(
            g.op.ReduceProd(g.op.Slice(sizes, g.const([0]), g.const([depth])), keepdims=1), width, axis=0
        )
        data = g.op.Reshape(x, rows)
        all_of = g.op.Concat(g.op.Shape(flat), width, axis=0)
        source = g.op.Reshape(updates, all_of)
        flat = g.op.Expand(g.op.Unsqueeze(flat, g.const([1])), all_of)
    scattered = g.op.ScatterElements(data, flat, source, axis=0, reduction=reduction.as_string())
    result: ir.Value = g.op.Reshape(scattered, sizes)
    return result


def _workaround(
    op: str,
    apply: Callable[[GraphBuilder, ir.Node], ir.Value | None],
    reason: str,
    when: Callable[[ir.Node], bool] | None = None,
    since: int | None = None,
) -> Rewrite:
    return Rewrite(apply.__name__, op, apply, opset=(since, None), target="onnxruntime", reason=reason, when=when)


_SCALES = "ONNX Runtime folds both numbers into the MatMul and removes a node that is still read"
_SCALED = reads("Mul", "Div")
REWRITES = [
    _workaround(
        "Pad",
        pad_apart_from_pool,
        "ONNX Runtime fuses a Pad of 0 into the pool: a MaxPool then pads with −∞, and padding as wide as the kernel is an error",
        read_by("MaxPool", "AveragePool"),
    ),
    _workaround("Mul", one_scale_before_matmul, _SCALES, _SCALED),
    _workaround("Div", one_scale_before_matmul, _SCALES, _SCALED),
    _workaround("ScatterND", scatter_in_turn, "ONNX Runtime reduces in several threads without a lock"),
    _workaround("DequantizeLinear", second_rounding, "ONNX Runtime replaces two quantisations by one"),
    _workaround("DequantizeLinear", unsigned_bytes, "ONNX Runtime repeats the pair without its zero point", since=21),
]
