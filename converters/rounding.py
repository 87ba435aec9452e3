"""Rounding to whole numbers and to decimals."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import truncated
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def rounding(op_type: str) -> Converter:
    """Floor, Ceil: integers stay as they are."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = node.args[0]
        return x if node.dtype.is_integer() else getattr(g.op, op_type)(x)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def round_decimals(g: GraphBuilder, node: FxNode) -> Value:
    """round.decimals(Tensor self, *, int decimals) -> Tensor

    In float32 for half types, as in torch: float16 has no number for 10 ** 5.
    """
    x, decimals = node.args
    if node.dtype.is_integer():
        raise Unsupported("rounding integers to decimals")
    dtype = wide(node.dtype)
    x, scale = g.cast(x, dtype), g.const(float(f"1e{abs(decimals)}"), dtype)
    if decimals >= 0:
        result = g.op.Div(g.op.Round(g.op.Mul(x, scale)), scale)
    else:
        result = g.op.Mul(g.op.Round(g.op.Div(x, scale)), scale)
    return g.cast(result, node.dtype)


def trunc(g: GraphBuilder, node: FxNode) -> Value:
    """trunc(Tensor self) -> Tensor"""
    x = node.args[0]
    return x if node.dtype.is_integer() else truncated(g, x)


def frac(g: GraphBuilder, node: FxNode) -> Value:
    """frac(Tensor self) -> Tensor"""
    x = node.args[0]
    return g.op.Sub(x, truncated(g, x))


RULES: list[Rule] = [
    *[Rule(f"aten::{name}.default", rounding(name.capitalize())) for name in ("floor", "ceil", "round")],
    Rule("aten::round.decimals", round_decimals),
    *overloads_of("trunc fix", "default", trunc),
    Rule("aten::frac.default", frac),
]
