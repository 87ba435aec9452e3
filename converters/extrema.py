"""The larger or smaller of two tensors, and clamping."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, WIDE_INTEGERS
from onnxplug.converters.helpers.promotion import operand, operands
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def extremum(op_type: str) -> Converter:
    """maximum, minimum: the result is NaN where an operand is NaN, as in ONNX."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args[:2]
        if node.dtype == BOOL:
            return getattr(g.op, "Or" if op_type == "Max" else "And")(*operands(g, x, y, dtype=BOOL))
        return compute(g, op_type, node.dtype, x, y)

    convert.__name__ = convert.__qualname__ = "maximum" if op_type == "Max" else "minimum"
    return convert


def ignoring_nan(op_type: str) -> Converter:
    """fmax, fmin: the result is the number where only one operand is NaN."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args
        dtype = node.dtype
        if not dtype.is_floating_point():
            return extremum(op_type)(g, node)
        inner = FLOAT if dtype.bitwidth == 16 else dtype
        a, b = operands(g, x, y, dtype=inner)
        both = getattr(g.op, op_type)(a, b)
        return g.cast(g.op.Where(g.op.IsNaN(a), b, g.op.Where(g.op.IsNaN(b), a, both)), dtype)

    convert.__name__ = convert.__qualname__ = "fmax" if op_type == "Max" else "fmin"
    return convert


def clamp(g: GraphBuilder, node: FxNode) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor

    Bounds promote the result (an int tensor with 0.5 gives a float one). Where min > max every element is max; ONNX's
    Clip and Min(Max()) agree. NaN stays NaN; a NaN bound makes every element NaN, which Clip does not do.
    """
    x, low, high = node.args
    return _clamp(g, node, x, low, high)


def clamp_min(g: GraphBuilder, node: FxNode) -> Value:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    return _clamp(g, node, node.args[0], node.args[1], None)


def clamp_max(g: GraphBuilder, node: FxNode) -> Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return _clamp(g, node, node.args[0], None, node.args[1])


def _clamp(g: GraphBuilder, node: FxNode, x: Value, low: Any, high: Any) -> Value:
    dtype = node.dtype
    if low is None and high is None:
        raise Unsupported("clamp without bounds: torch itself refuses it")
    numbers = [b for b in (low, high) if b is not None]
    plain = not any(isinstance(b, Value) or b != b for b in numbers)
    if plain and (dtype.is_floating_point() or dtype in WIDE_INTEGERS):
        if dtype.is_integer():
            least, most = (-(1 << (dtype.bitwidth - 1)), (1 << (dtype.bitwidth - 1)) - 1)
            low, high = (None if b is None else int(min(max(b, least), most)) for b in (low, high))
        low, high = (None if b is None else g.const(b, dtype) for b in (low, high))
        x = g.cast(x, dtype)
        if low is not None and high is not None:
            return g.op.Clip(x, low, high)
        if dtype.is_integer():
            result = g.op.Clip(x, low, high)
            return result
        # For a bound that is absent ONNX Runtime's Clip takes the largest finite number, which infinity exceeds.
        return compute(g, "Max", dtype, x, low) if low is not None else compute(g, "Min", dtype, x, high)
    clamped = operand(g, x, dtype)
    if low is not None:
        clamped = compute(g, "Max", dtype, clamped, low)
    return clamped if high is None else compute(g, "Min", dtype, clamped, high)


RULES: list[Rule] = [
    *overloads_of("maximum", "default", extremum("Max")),
    *overloads_of("minimum", "default", extremum("Min")),
    *overloads_of("max", "other", extremum("Max")),
    *overloads_of("min", "other", extremum("Min")),
    Rule("aten::fmax.default", ignoring_nan("Max")),
    Rule("aten::fmin.default", ignoring_nan("Min")),
    *overloads_of("clamp clip", "default Tensor", clamp),
    *overloads_of("clamp_min", "default Tensor", clamp_min),
    *overloads_of("clamp_max", "default Tensor", clamp_max),
]
