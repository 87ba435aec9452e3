"""Normalisations in the form that runtimes and their tools know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import attribute_values, int_attribute, is_op, made_by, read_by, reads, used_once
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder


def sum_before_norm(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Add`` before a ``LayerNormalization`` as ``Sum``, which computes the same.

    ONNX Runtime fuses an Add with a LayerNormalization; on the CPU the fused operator takes 140 us for [2, 64, 256] where
    Sum and LayerNormalization take 35 us together (1.31, measured, one thread).
    """
    total = node.outputs[0]
    if total.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    if not any(is_op(n, "LayerNormalization") and n.inputs[0] is total for n in total.consumers()):
        return None
    result: ir.Value = g.op.Sum(*node.inputs)
    return result


def root_mean_square_norm(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``w * (x * Reciprocal(Sqrt(mean(x * x) + e)))`` as ``x / Sqrt(mean(Pow(x, 2)) + e) * w``.

    The form that runtimes and optimizers fuse into one node. Zeros, infinities and NaN give the same in both. Only for float: on
    doubles, the fused node computes something else.
    """
    if node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    for normal, weight in (node.inputs, node.inputs[::-1]):
        scaled = made_by(normal, "Mul")
        if scaled is None or weight is None or not used_once(normal) or len(dims_of(weight) or ()) != 1:
            continue
        for x, inverse in (scaled.inputs, scaled.inputs[::-1]):
            reciprocal = made_by(inverse, "Reciprocal")
            root = made_by(reciprocal.inputs[0], "Sqrt") if reciprocal is not None else None
            if x is None or root is None or not used_once(inverse) or not used_once(root.outputs[0]):
                continue
            mean_and_epsilon = _mean_of_squares(g, x, root.inputs[0])
            if mean_and_epsilon is None or dims_of(weight) != (dims_of(x) or ())[-1:]:
                continue
            mean, epsilon = mean_and_epsilon
            squares = g.op.Pow(x, g.const(2.0, x.dtype))
            again = g.op.ReduceMean(squares, *mean.inputs[1:], **attribute_values(mean))
            result: ir.Value = g.op.Mul(g.op.Div(x, g.op.Sqrt(g.op.Add(again, epsilon))), weight)
            return result
    return None


def _mean_of_squares(g: GraphBuilder, x: ir.Value, value: ir.Value | None) -> tuple[ir.Node, ir.Value] | None:
    """The ReduceMean over the last axis, and the epsilon, if the value is ``mean(x * x) + epsilon``."""
    add = made_by(value, "Add")
    if add is None or not used_once(value):
        return None
    for total, epsilon in (add.inputs, add.inputs[::-1]):
        mean = made_by(total, "ReduceMean")
        square = made_by(mean.inputs[0], "Mul", "Pow") if mean is not None else None
        number = g.constant(epsilon)
        if (
            mean is None
            or square is None
            or epsilon is None
            or number is None
            or number.size != 1
            or number.ndim > len(x.shape or ())
            or not used_once(total)
        ):
            continue
        exponent = g.constant(square.inputs[1])
        squared = (
            square.inputs[1] is x if square.op_type == "Mul" else exponent is not None and bool((exponent == 2).all())
        )
        if square.inputs[0] is x and squared and used_once(mean.inputs[0]) and _over_last(g, mean, len(x.shape or ())):
            return mean, epsilon
    return None


def _over_last(g: GraphBuilder, mean: ir.Node, rank: int) -> bool:
    axes = g.constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
    normalized_axes = (
        list(axes) if axes is not None else list(mean.attributes["axes"].as_ints()) if "axes" in mean.attributes else []
    )
    return bool(int_attribute(mean, "keepdims", 1)) and [int(a) for a in normalized_axes] in ([-1], [rank - 1])


REWRITES = [
    Rewrite(
        "sum_before_norm",
        "Add",
        sum_before_norm,
        target="onnxruntime:cpu",
        when=read_by("LayerNormalization"),
        reason="ONNX Runtime fuses Add and LayerNormalization into an operator that is slower than both on the CPU",
    ),
    Rewrite(
        "root_mean_square_norm",
        "Mul",
        root_mean_square_norm,
        when=reads("Mul"),
        reason="runtimes and optimizers make one node of a normalization in this form",
    ),
]
