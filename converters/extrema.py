"""The larger or smaller of two tensors, and clamping."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.dtypes import BOOL, INT64, WIDE_INTEGERS
from onnxplug.converters.helpers.promotion import operand, operands
from onnxplug.converters.helpers.runtimes import LOW_HALVES_ARE_SIGNED, computed_in, has_kernel
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
        inner = computed_in(g, f"{op_type} IsNaN Where", dtype)
        a, b = operands(g, x, y, dtype=inner)
        both = getattr(g.op, op_type)(a, b)
        return g.cast(g.op.Where(g.op.IsNaN(a), b, g.op.Where(g.op.IsNaN(b), a, both)), dtype)

    convert.__name__ = convert.__qualname__ = "fmax" if op_type == "Max" else "fmin"
    return convert


def clamp(g: GraphBuilder, node: FxNode) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor

    The bounds take part in type promotion (an int tensor and 0.5 give a float tensor). Where min > max every element is
    max, as in ONNX's Clip and Min(Max()). NaN elements remain; a NaN bound makes every element NaN, which Clip does not
    do.
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
    are_numbers = not any(isinstance(b, Value) or b != b for b in numbers)
    if are_numbers and dtype in WIDE_INTEGERS:
        least, most = (-(1 << (dtype.bitwidth - 1)), (1 << (dtype.bitwidth - 1)) - 1)
        low, high = (None if b is None else int(min(max(b, least), most)) for b in (low, high))
    # ONNX Runtime expands Clip of bfloat16 to Where, which takes bfloat16 since opset 16.
    is_wrong = dtype == ir.DataType.BFLOAT16 and g.opset < 16
    is_wrong = is_wrong or (dtype == INT64 and LOW_HALVES_ARE_SIGNED.concerns(g))
    if is_wrong or not are_numbers or not has_kernel(g, "Clip", dtype):
        return _by_extrema(g, x, low, high, dtype)
    return g.op.Clip(g.cast(x, dtype), *(None if b is None else operand(g, b, dtype) for b in (low, high)))


def _by_extrema(g: GraphBuilder, x: Value, low: Any, high: Any, dtype: ir.DataType) -> Value:
    clamped = operand(g, x, dtype)
    if low is not None:
        clamped = compute(g, "Max", dtype, clamped, low)
    return clamped if high is None else compute(g, "Min", dtype, clamped, high)


def clamp_by_extrema(g: GraphBuilder, node: FxNode) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    x, low, high = node.args
    return _by_extrema(g, x, low, high, node.dtype)


def clamp_min_by_extremum(g: GraphBuilder, node: FxNode) -> Value:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    x, low = node.args
    return _by_extrema(g, x, low, None, node.dtype)


def clamp_max_by_extremum(g: GraphBuilder, node: FxNode) -> Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    x, high = node.args
    return _by_extrema(g, x, None, high, node.dtype)


def _has_one_bound(node: FxNode) -> bool:
    return node.dtype.is_floating_point() and sum(bound is not None for bound in node.args[1:]) == 1


_BEYOND: dict[str, Any] = {
    "target": "onnxruntime",
    "when": _has_one_bound,
    "reason": "for a bound that is absent its Clip takes the largest finite number, which infinity exceeds",
}
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
    *overloads_of("clamp clip", "default Tensor", clamp_by_extrema, **_BEYOND),
    *overloads_of("clamp_min", "default Tensor", clamp_min_by_extremum, **_BEYOND),
    *overloads_of("clamp_max", "default Tensor", clamp_max_by_extremum, **_BEYOND),
]
