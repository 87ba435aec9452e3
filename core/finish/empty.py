"""Reshapes to computed sizes, one of which may be 0 when the model runs."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxplug.build.scope import nodes_of

#: Operators that compute a size of other sizes.
_ARITHMETIC = frozenset("Add Sub Mul Div Mod Min Max Neg Abs Floor Ceil Cast Gather Slice Squeeze Unsqueeze".split())


def keep_empty(graph: ir.Graph, opset: int) -> None:
    """Marks reshapes that state every size: without the mark, a 0 among them is the input's size at that place.

    Only those to sizes that are read off other tensors or computed of such sizes, or constants other than 0 and -1. This
    comes after the rewrites, which know shapes without the mark.

    Args:
        graph: The graph; it is changed.
        opset: Version of ai.onnx; below 14 a reshape has no such mark.
    """
    if opset < 14:
        return
    mark = ir.AttrInt64("allowzero", 1)
    stated: dict[int, bool] = {}  # many reshapes share their sizes
    for node in nodes_of(graph):
        if node.op_type != "Reshape" or node.domain or "allowzero" in node.attributes:
            continue
        shape = node.inputs[1]
        if id(shape) not in stated:
            stated[id(shape)] = _states_every_size(shape)
        if stated[id(shape)]:
            node.attributes["allowzero"] = mark


def _states_every_size(shape: ir.Value | None) -> bool:
    producer = shape.producer() if shape is not None else None
    if producer is None or producer.op_type != "Concat" or producer.domain != "":
        return False
    return all(_is_size(part) for part in producer.inputs)


def _is_size(part: ir.Value | None) -> bool:
    if part is None:
        return False
    if part.producer() is None:
        return part.const_value is not None and bool((part.const_value.numpy() > 0).all())
    leaves = list(_leaves(part))
    return any(map(_is_made_by_shape, leaves)) and all(
        _is_made_by_shape(leaf) or leaf.const_value is not None for leaf in leaves
    )


def _leaves(value: ir.Value) -> Iterator[ir.Value]:
    """What a number is computed of by arithmetic."""
    producer = value.producer()
    if producer is None or producer.domain != "" or producer.op_type not in _ARITHMETIC:
        yield value
    else:
        for operand in producer.inputs:
            if operand is not None:
                yield from _leaves(operand)


def _is_made_by_shape(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Shape" and producer.domain == ""
