"""Forms that ONNX Runtime's own graph optimisations keep right.

Each rewrite here replaces a plain form that ONNX Runtime 1.31 turns into a wrong or invalid graph when its optimisations
are on, by a form that computes the same and stays as it is. ``tests/rewrite/test_onnxruntime.py`` shows each fault in
the plain form: when a later version mends it, the test fails and the rewrite can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import int_attribute, is_op, made_by, read_by, reads, used_once
from onnxplug.rewrite.rewrite import Rewrite
from onnxplug.rewrites.rows import are_few

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

#: How many values are visited, at most, to find the Transpose before a value.
_MOST_VALUES = 64
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def consumers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses()]


def pad_apart_from_pool(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``Pad`` with zeros before a pool pads a tensor of one more axis.

    ONNX Runtime makes such a Pad the pool's own padding. A MaxPool pads with −∞ instead of 0: negative maxima at the border are
    wrong. Either pool does not load with padding as wide as the kernel, and several Pads are added up.
    """
    x, pads, fill, axes = [*node.inputs, None, None][:4]
    readers = consumers(node.outputs[0])
    if not any(is_op(n, "AveragePool") or (is_op(n, "MaxPool") and len(n.outputs) == 1) for n in readers):
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
    if node is None or not is_op(node, "Mul", "Div"):
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
    """A number times a number times ``x`` before a ``MatMul``, where ``x`` times the first number has another reader.

    ONNX Runtime folds both numbers into the product and removes the inner node, which is still read: the model does not
    load. The new number is the product of both in double precision.
    """
    result = node.outputs[0]
    if result.dtype not in _FLOATS or not any(_feeds_matmul(n) for n in consumers(result)):
        return None
    outer = _scale_of(g, result)
    inner = _scale_of(g, outer[0]) if outer is not None else None
    if outer is None or inner is None or used_once(outer[0]):
        return None
    before = outer[0].producer()
    if before is None or before.graph is not node.graph:  # no fusion goes into a branch or body
        return None
    number, limits = abs(outer[1] * inner[1]), ml_dtypes.finfo(result.dtype.numpy())
    if not float(limits.smallest_normal) <= number <= float(limits.max):
        return None  # a number that the type lacks, where its two factors are none
    scaled: ir.Value = g.op.Mul(inner[0], g.const(outer[1] * inner[1], result.dtype))
    return scaled


def _feeds_matmul(node: ir.Node) -> bool:
    """Whether a node is a product, or only transposes or scales for one."""
    seen = [node]
    while seen:
        current = seen.pop()
        if is_op(current, "MatMul"):
            return True
        if is_op(current, "Transpose", "Mul", "Div"):
            seen.extend(consumers(current.outputs[0]))
    return False


def double_scale_apart_from_matmul(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A number times or dividing doubles before or after a ``MatMul`` is a vector of that number.

    ONNX Runtime makes a number the attribute ``alpha`` of its FusedMatMul, which holds a float: a relative error of up to 6e-8.
    It leaves vectors alone.
    """
    result = node.outputs[0]
    scaled = _scale_of(g, result) if result.dtype == ir.DataType.DOUBLE else None
    with np.errstate(over="ignore"):
        if scaled is None or float(np.float32(scaled[1])) == scaled[1]:
            return None
    x = scaled[0]
    if made_by(x, "MatMul") is None and not any(_feeds_matmul(n) for n in consumers(result)):
        return None
    sizes = list(enumerate(reversed(dims_of(x) or ())))
    size, places_after = min(((n, after) for after, n in sizes if isinstance(n, int) and n > 1), default=(0, 0))
    number = g.constant(node.inputs[1] if x is node.inputs[0] else node.inputs[0])
    if number is None:
        return None
    if size:
        vector = g.const(np.full((size, *[1] * places_after), number.item()))
    else:
        after = next((after for after, n in sizes if not isinstance(n, int)), None)
        if after is None:
            return None
        axis = g.op.Slice(g.op.Shape(x), g.const([-1 - after]), g.const([-after or np.iinfo(np.int64).max]))
        ones = [g.const([1] * after)] if after else []
        vector = g.op.Expand(g.const(number.reshape(())), g.op.Concat(axis, *ones, axis=0) if ones else axis)
    widened: ir.Value = g.op.Mul(x, vector) if node.op_type == "Mul" else g.op.Div(x, vector)
    return widened


def _second_is_vector(node: ir.Node) -> bool:
    """Whether a product has a vector as its second operand and a matrix, or several, as its first."""
    first, second = (dims_of(value) for value in node.inputs)
    return second is not None and len(second) == 1 and (first is None or len(first) > 1)


def _is_transposed(value: ir.Value) -> bool:
    """Whether a Transpose comes before a value, so that ONNX Runtime may move it up to the value."""
    pending, seen = [value], {value}
    while pending and len(seen) <= _MOST_VALUES:
        node = pending.pop().producer()
        if is_op(node, "Transpose"):
            return True
        # No Transpose is moved past a product.
        before = (
            [] if node is None or is_op(node, "MatMul", "Gemm", "Conv") else [v for v in node.inputs if v is not None]
        )
        pending += [v for v in before if v not in seen]
        seen.update(before)
    return False


def vector_before_matrix(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``MatMul`` of a transposed matrix with a vector becomes the product of the vector with the matrix itself.

    ONNX Runtime fuses the Transpose into the product and then computes the wrong product of the matrix and the vector. The vector
    as the first operand is right.
    """
    matrix, vector = node.inputs
    assert matrix is not None and vector is not None
    shape = dims_of(matrix)
    if shape is None or not _is_transposed(matrix):
        return None
    swap = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    transpose = made_by(matrix, "Transpose")
    perm = transpose.attributes.get("perm") if transpose is not None else None
    if transpose is not None and perm is not None and list(perm.as_ints()) == swap:
        other = transpose.inputs[0]
    else:
        other = g.op.Transpose(matrix, perm=swap)
    result: ir.Value = g.op.MatMul(vector, other)
    return result


def scatter_in_turn(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``ScatterND`` with a reduction is a ``ScatterElements`` of rows.

    ONNX Runtime's ScatterND adds slices in several threads at once, without a lock: slices for the same place are sometimes
    lost. Its ScatterElements adds them one after the other.
    """
    reduction = node.attributes.get("reduction")
    x, index, updates = node.inputs
    shape, places = dims_of(x), dims_of(index)
    if are_few(g, node):
        return None
    if reduction is None or reduction.as_string() == "none" or shape is None or not places:
        return None
    depth = places[-1]
    assert x is not None and index is not None and updates is not None
    if not isinstance(depth, int) or depth < 1:
        return None
    if depth == 1 and len(places) == 2:
        return _rows_in_turn(g, x, index, updates, reduction.as_string())
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


def _rows_in_turn(g: GraphBuilder, x: ir.Value, index: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
    """``ScatterND`` by the places of rows, [N, 1]; ScatterElements too counts negative places from the end."""
    unsqueeze = made_by(index, "Unsqueeze")
    rows = unsqueeze.inputs[0] if unsqueeze is not None and len(unsqueeze.inputs) > 1 else None
    axes = g.constant(unsqueeze.inputs[1]) if unsqueeze is not None and rows is not None else None
    if rows is None or axes is None or axes.tolist() not in ([1], [-1]):
        rows = g.op.Squeeze(index, g.const([1]))
    rank = len(dims_of(x) or ())
    if rank > 1:
        rows = g.op.Expand(g.op.Unsqueeze(rows, g.const(list(range(1, rank)))), g.op.Shape(updates))
    result: ir.Value = g.op.ScatterElements(x, rows, updates, axis=0, reduction=reduction)
    return result


def gather_by_range(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Gather`` by a ``Range`` that may begin or end below 0: the Range of the opposite numbers, negated.

    ONNX Runtime turns it into a Slice from the Range's start to its end, which reads -1 as the last element.
    """
    range_node = made_by(node.inputs[1], "Range")
    if range_node is None:
        return None
    start, end, step = range_node.inputs
    first, by = g.constant(start), g.constant(step)
    upwards = by is not None and by > 0
    if upwards and (g.sizes.never_negative(start) if first is None else first >= 0):
        return None
    places = g.op.Neg(g.op.Range(g.op.Neg(start), g.op.Neg(end), g.op.Neg(step)))
    result: ir.Value = g.op.Gather(node.inputs[0], places, axis=int_attribute(node, "axis", 0))
    return result


def clip_of_relu(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Clip(Relu(x), low, high)`` is ``Clip(x, max(low, 0), high)``.

    ONNX Runtime does the same, for 32- and 16-bit floats; a model of any other type does not load.
    """
    relu = made_by(node.inputs[0], "Relu")
    low = g.constant(node.inputs[1]) if relu is not None and len(node.inputs) > 1 else None
    if relu is None or low is None:
        return None
    bounds = [g.const(np.maximum(low, np.zeros_like(low))), *node.inputs[2:]]
    result: ir.Value = g.op.Clip(relu.inputs[0], *bounds)
    return result


_AFTER_RELU = reads("Relu")


def _is_not_fused_with_relu(node: ir.Node) -> bool:
    return node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) and _AFTER_RELU(node)


def workaround(
    op: str,
    apply: Callable[[GraphBuilder, ir.Node], ir.Value | Mapping[ir.Value, ir.Value] | None],
    reason: str,
    when: Callable[[ir.Node], bool] | None = None,
    since: int | None = None,
) -> Rewrite:
    """A rewrite for ONNX Runtime alone, named as its function."""
    return Rewrite(apply.__name__, op, apply, opset=(since, None), target="onnxruntime", reason=reason, when=when)


def _of_doubles(node: ir.Node) -> bool:
    return node.outputs[0].dtype == ir.DataType.DOUBLE


_SCALES = "ONNX Runtime folds both numbers into the MatMul and removes a node that is still read"
_SCALED = reads("Mul", "Div")
REWRITES = [
    workaround(
        "Pad",
        pad_apart_from_pool,
        "ONNX Runtime fuses a Pad of 0 into the pool: a MaxPool then pads with −∞, and padding as wide as the kernel is an error",
        read_by("MaxPool", "AveragePool"),
    ),
    workaround(
        "MatMul",
        vector_before_matrix,
        "ONNX Runtime fuses a Transpose of the first operand wrongly where the second is a vector",
        _second_is_vector,
    ),
    workaround("Mul", one_scale_before_matmul, _SCALES, _SCALED),
    workaround("Div", one_scale_before_matmul, _SCALES, _SCALED),
    *(
        workaround(op, double_scale_apart_from_matmul, "ONNX Runtime rounds a double's factor to float", _of_doubles)
        for op in ("Mul", "Div")
    ),
    workaround(
        "Clip",
        clip_of_relu,
        "ONNX Runtime fuses Relu and Clip of 32- and 16-bit floats, and fails on other types",
        _is_not_fused_with_relu,
    ),
    workaround("Gather", gather_by_range, "ONNX Runtime makes a Slice of it, to which -1 is the last", reads("Range")),
    workaround("ScatterND", scatter_in_turn, "ONNX Runtime reduces in several threads without a lock"),
]
