"""Reshapes to computed sizes, one of which may be 0 when the model runs."""

from __future__ import annotations

import onnx_ir as ir

from onnxplug.build.scope import nodes_of

#: Operators that compute a size from other sizes.
_ARITHMETIC = frozenset(
    "Add Sub Mul Div Mod Min Max Neg Abs Floor Ceil Cast Gather Slice Squeeze Unsqueeze ReduceProd".split()
)


def keep_empty(graph: ir.Graph, opset: int) -> None:
    """Marks reshapes that state every size: without the mark, a 0 among them is the input's size at that place.

    Only reshapes to sizes that are read off other tensors or computed from such sizes, or constants other than 0 and -1. This
    comes after the rewrites, which match reshapes without the mark.

    Args:
        graph: The graph; it is changed.
        opset: Version of ai.onnx; below 14 a reshape has no such mark.
    """
    if opset < 14:
        return
    mark = ir.AttrInt64("allowzero", 1)
    sizes: dict[int, bool] = {}
    for node in nodes_of(graph):
        if node.domain:
            continue
        if (
            node.op_type == "Reshape"
            and "allowzero" not in node.attributes
            and _states_every_size(node.inputs[1], sizes)
        ):
            node.attributes["allowzero"] = mark
        elif node.op_type in ("Shape", "Size"):
            sizes[id(node.outputs[0])] = True
        elif node.op_type in _ARITHMETIC:
            operands = [_is_size(operand, sizes) for operand in node.inputs if operand is not None]
            if None not in operands:
                sizes[id(node.outputs[0])] = any(operands)


def _states_every_size(shape: ir.Value | None, sizes: dict[int, bool]) -> bool:
    if shape is not None and sizes.get(id(shape)):
        return True
    producer = shape.producer() if shape is not None else None
    if producer is None or producer.op_type != "Concat" or producer.domain != "":
        return False
    return all(part is not None and (_is_size(part, sizes) or _is_positive(part)) for part in producer.inputs)


def _is_size(value: ir.Value, sizes: dict[int, bool]) -> bool | None:
    """Whether a value is computed from a size of a tensor; ``None`` where it is computed from other data.

    Args:
        value: The value.
        sizes: The answers for results of earlier nodes, by identity.
    """
    return False if value.const_value is not None else sizes.get(id(value))


def _is_positive(value: ir.Value) -> bool:
    return value.producer() is None and value.const_value is not None and bool((value.const_value.numpy() > 0).all())
