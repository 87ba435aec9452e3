"""Attention that models write out, in a form with less to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import attribute_values, made_by, reads, used_once
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder


def biases_added_once(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Softmax(scores + a + b)`` as ``Softmax(scores + (a + b))``, where that saves a sum of the scores' size.

    It does where other layers add the same two values, a bias of positions and a mask in T5, or where ``a + b`` has fewer elements
    than the scores. Only for float and double: a half type's sum of a mask of the least number and a bias would be −inf.
    """
    outer = made_by(node.inputs[0], "Add")
    if outer is None or not used_once(node.inputs[0]):
        return None
    if node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    for total, second in (outer.inputs, outer.inputs[::-1]):
        inner = made_by(total, "Add")
        if inner is None or second is None or not used_once(total):
            continue
        for scores, first in (inner.inputs, inner.inputs[::-1]):
            product = made_by(scores, "Mul", "Div")
            if made_by(product.inputs[0] if product is not None else scores, "MatMul") is None or first is None:
                continue
            if not _is_added_again(first, second, outer) and not _is_smaller(first, second, node.inputs[0]):
                continue
            biases = g.op.Add(first, second)
            result: ir.Value = g.op.Softmax(g.op.Add(scores, biases), **attribute_values(node))
            return result
    return None


def _is_added_again(first: ir.Value, second: ir.Value, outer: ir.Node) -> bool:
    """Whether another sum adds the same two values, one after the other or to each other."""
    for other in second.consumers():
        if other is outer or made_by(other.outputs[0], "Add") is None:
            continue
        for value in other.inputs:
            inner = made_by(value, "Add")
            if value is first or (inner is not None and any(v is first for v in inner.inputs)):
                return True
    return False


def _is_smaller(first: ir.Value, second: ir.Value, total: ir.Value | None) -> bool:
    """Whether the sum of two values is repeated along an axis of more elements to the shape of ``total``."""
    shapes, whole = [dims_of(v) for v in (first, second)], dims_of(total)
    if whole is None or any(shape is None for shape in shapes):
        return False
    padded = [(1,) * (len(whole) - len(shape)) + shape for shape in shapes if shape is not None]
    return any(size != 1 and a == 1 and b == 1 for size, a, b in zip(whole, *padded, strict=True))


REWRITES = [Rewrite("biases_added_once", "Softmax", biases_added_once, when=reads("Add"))]
