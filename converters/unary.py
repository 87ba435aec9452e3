"""Elementwise operators of one tensor that ONNX has too, sign, absolute value and angle."""

from __future__ import annotations

import math

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.exactness import NOT_A_NUMBER, of_floats
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.runtimes import LOW_HALVES_ARE_SIGNED, computed_in, has_kernel
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def unary(op_type: str) -> Converter:
    """A converter for an operator that ONNX has under one name; integers become floats where torch's result is a float."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = node.dtype
        x = operand(g, node.args[0], computed_in(g, op_type, dtype))
        return g.cast(getattr(g.op, op_type)(x), dtype)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def neg(g: GraphBuilder, node: FxNode) -> Value:
    """neg(Tensor self) -> Tensor"""
    x = node.args[0]
    if not has_kernel(g, "Neg", node.dtype):  # ONNX has none for unsigned integers
        return compute(g, "Sub", node.dtype, 0, x)
    return g.op.Neg(x)


def abs_(g: GraphBuilder, node: FxNode) -> Value:
    """abs(Tensor self) -> Tensor"""
    return g.op.Abs(node.args[0])


def sign(g: GraphBuilder, node: FxNode) -> Value:
    """sign(Tensor self) -> Tensor"""
    x = node.args[0]
    if node.dtype == BOOL:
        return x
    if node.dtype == INT64 and LOW_HALVES_ARE_SIGNED.concerns(g):
        zero = g.const(0)
        return g.op.Sub(g.cast(g.op.Greater(x, zero), INT64), g.cast(g.op.Less(x, zero), INT64))
    return g.op.Sign(x)


def sign_exact(g: GraphBuilder, node: FxNode) -> Value:
    """sign(Tensor self) -> Tensor

    The sign of NaN is 0.
    """
    x = node.args[0]
    return g.op.Where(g.op.IsNaN(x), g.const(0.0, node.dtype), g.op.Sign(x))


def angle(g: GraphBuilder, node: FxNode) -> Value:
    """angle(Tensor self) -> Tensor

    The angle of a real number: pi below zero, 0 otherwise.
    """
    x = operand(g, node.args[0], node.dtype)
    zero = g.const(0.0, node.dtype)
    return g.op.Where(g.op.Less(x, zero), g.const(math.pi, node.dtype), zero)


def angle_exact(g: GraphBuilder, node: FxNode) -> Value:
    """angle(Tensor self) -> Tensor

    The result for NaN is NaN.
    """
    x = node.args[0]
    return g.op.Where(g.op.IsNaN(x), x, angle(g, node))


def sigmoid_exact(g: GraphBuilder, node: FxNode) -> Value:
    """sigmoid(Tensor self) -> Tensor

    ``e / (1 + e)`` for negative numbers and ``1 / (1 + e)`` for others, of ``e = exp(-|x|)``: small results keep their digits.
    """
    x = operand(g, node.args[0], node.dtype)
    one = g.const(1.0, node.dtype)
    e = g.op.Exp(g.op.Neg(g.op.Abs(x)))
    return g.op.Div(g.op.Where(g.op.Less(x, g.const(0.0, node.dtype)), e, one), g.op.Add(e, one))


_UNARY = {
    "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos",
    "tanh": "Tanh", "sigmoid": "Sigmoid",
}  # fmt: skip
RULES: list[Rule] = [
    *[Rule(f"aten::{name}.default", unary(op_type)) for name, op_type in _UNARY.items()],
    *overloads_of("neg negative", "default", neg),
    *overloads_of("abs absolute", "default", abs_),
    *overloads_of("sign sgn", "default", sign),
    Rule(
        "aten::sigmoid.default",
        sigmoid_exact,
        exact=True,
        target="onnxruntime",
        reason="ONNX Runtime's kernel is up to 6e-8 off, and 0 below -18",
    ),
    Rule("aten::angle.default", angle),
    Rule("aten::angle.default", angle_exact, when=of_floats, **NOT_A_NUMBER),
    *overloads_of("sign sgn", "default", sign_exact, when=of_floats, **NOT_A_NUMBER),
]
