"""The largest or smallest element of a Concat of two tensors, which OpenVINO 2025.4 takes for their larger elements.

It computes ``ReduceMax(Concat(a, b))`` along the axis of the Concat as ``Squeeze(Max(a, b))`` for all sizes: right
where both have one element along the axis, and unwritten memory elsewhere (``ConcatReduceFusion``;
openvinotoolkit/openvino#33384 mends it). It fuses neither a Concat of three parts nor a Concat whose axis is counted
from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

#: Operators that OpenVINO computes by its ReduceMax or ReduceMin.
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMin", "GlobalMaxPool", "DynamicQuantizeLinear"})
#: Operators that OpenVINO removes where they change neither type nor shape.
_COPIES = frozenset({"Identity", "Dropout", "Cast", "Reshape", "Expand", "Slice", "Squeeze"})
#: The removed operators that keep the number of elements.
_SAME_COUNT = _COPIES - {"Expand", "Slice"}
_SIGNALS = 3  # axes of a batch of signals
_ENDLESS = 2**31 - 1  # an end beyond every size


def mistaken(node: ir.Node) -> ir.Node | None:
    """The Concat whose largest or smallest elements a node computes, where OpenVINO computes Max or Min of its parts.

    Args:
        node: A node of ai.onnx.
    """
    axis = _reduced_axis(node) if node.op_type in _REDUCTIONS else None
    value = node.inputs[0] if axis is not None else None
    while axis is not None and value is not None:
        producer = value.producer()
        if producer is None or producer.graph is not node.graph or producer.domain not in ("", "ai.onnx"):
            return None
        if producer.op_type == "Concat":
            return producer if _is_of_two_parts(producer, axis) else None
        if producer.op_type == "Transpose":
            axis = _permutation(producer, axis)
            value = producer.inputs[0]
        else:
            value = _copied(producer)
    return None


def _reduced_axis(node: ir.Node) -> int | None:
    """The only axis along which a node reduces; ``None`` where it is unknown, or there are several."""
    x = node.inputs[0]
    if x is None or x.shape is None or x.dtype in (None, ir.DataType.BOOL):
        return None
    rank = len(x.shape)
    if node.op_type == "GlobalMaxPool":
        return 2 if rank == _SIGNALS else None
    axes = _axes(node, rank)
    return axes[0] % rank if axes is not None and len(axes) == 1 and -rank <= axes[0] < rank else None


def _axes(node: ir.Node, rank: int) -> Sequence[int] | None:
    """The axes along which a node reduces; ``None`` where they are not constant, or where the node does not reduce."""
    axes: Sequence[int] | None = ()
    if "axes" in node.attributes:
        axes = node.attributes["axes"].value
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = _numbers(node.inputs[1])
    if axes is None or len(axes):
        return axes
    keeps = node.attributes.get("noop_with_empty_axes")
    return range(rank) if keeps is None or keeps.value == 0 else None


def _is_of_two_parts(concat: ir.Node, axis: int) -> bool:
    """Whether a Concat is along ``axis``, counted from the start, of two parts, not both known to have one element."""
    sizes = [size for size in (_size(value, axis) for value in concat.inputs) if size != 0]
    return concat.attributes["axis"].value == axis and len(sizes) == 2 and sizes != [1, 1]


def _size(value: ir.Value | None, axis: int) -> int | None:
    size = value.shape[axis] if value is not None and value.shape is not None else None
    return size if isinstance(size, int) else None


def _permutation(transpose: ir.Node, axis: int) -> int | None:
    """The axis of a Transpose's operand that is an axis of its result."""
    if "perm" in transpose.attributes:
        return transpose.attributes["perm"].value[axis]
    shape = transpose.outputs[0].shape
    return None if shape is None else len(shape) - 1 - axis


def _copied(node: ir.Node) -> ir.Value | None:
    """The operand that a node returns unchanged; ``None`` where the node may change it."""
    x = node.inputs[0] if node.op_type in _COPIES else None
    before = x.producer() if x is not None else None
    if node.op_type == "Slice" and _is_whole(node):
        return x
    if node.op_type == "Squeeze" and before is not None and before.op_type == "Unsqueeze":
        x = before.inputs[0]
    return x if x is not None and _is_same(x, node.outputs[0], node.op_type in _SAME_COUNT) else None


def _is_whole(slicing: ir.Node) -> bool:
    """Whether a Slice takes all elements by its constants."""
    starts, ends, _, steps = [*map(_numbers, slicing.inputs[1:]), *[[]] * 4][:4]
    if starts is None or not ends or steps is None:
        return False
    return not any(starts) and all(end >= _ENDLESS for end in ends) and all(step == 1 for step in steps)


def _numbers(value: ir.Value | None) -> list[int] | None:
    """A constant's numbers."""
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if constant is None else [int(number) for number in constant.numpy().flat]


def _is_same(one: ir.Value, other: ir.Value, has_same_count: bool) -> bool:
    """Whether two values have the same type and shape; a size may be unknown if the number of elements is the same."""
    if one.dtype != other.dtype or one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    unequal = [a for a, b in zip(one.shape, other.shape, strict=True) if a != b or not (isinstance(a, int) or a.value)]
    return len(unequal) <= has_same_count
