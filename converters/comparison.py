"""Comparison, logic, bits and selection."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.promotion import common_dtype, operands_in
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.selection import select
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def comparison(op_type: str, *, negate: bool = False, swap: bool = False) -> Converter:
    """eq, ne, lt, le, gt, ge, computed in the dtype to which torch promotes both operands."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args
        dtype = common_dtype(node, 0, 1)
        a, b = operands_in(g, x, y, dtype=dtype, inner=computed_in(g, op_type, dtype))
        result: Value = getattr(g.op, op_type)(*((b, a) if swap else (a, b)))
        return g.op.Not(result) if negate else result

    convert.__name__ = convert.__qualname__ = ("not_" if negate else "") + op_type.lower()
    return convert


def logical(op_type: str) -> Converter:
    """logical_and, logical_or, logical_xor: every element that is not zero is true, NaN included."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        a, b = (truth(g, x) for x in node.args)
        return getattr(g.op, op_type)(a, b)

    convert.__name__ = convert.__qualname__ = f"logical_{op_type.lower()}"
    return convert


def truth(g: GraphBuilder, x: Value) -> Value:
    """Whether an element differs from zero."""
    return g.cast(x, BOOL)


def logical_not(g: GraphBuilder, node: FxNode) -> Value:
    """logical_not(Tensor self) -> Tensor"""
    return g.op.Not(truth(g, node.args[0]))


def isnan(g: GraphBuilder, node: FxNode) -> Value:
    """isnan(Tensor self) -> Tensor"""
    x = node.args[0]
    if not x.dtype.is_floating_point():
        return _all_false(g, x)
    return g.op.IsNaN(x)


def isinf(g: GraphBuilder, node: FxNode) -> Value:
    """isinf(Tensor self) -> Tensor"""
    x = node.args[0]
    if not x.dtype.is_floating_point():
        return _all_false(g, x)
    return g.op.IsInf(_wide(g, x))


def isfinite(g: GraphBuilder, node: FxNode) -> Value:
    """isfinite(Tensor self) -> Tensor"""
    x = node.args[0]
    if not x.dtype.is_floating_point():
        return g.op.Not(_all_false(g, x))
    return g.op.Not(g.op.Or(g.op.IsInf(_wide(g, x)), g.op.IsNaN(x)))


def _wide(g: GraphBuilder, x: Value) -> Value:
    """16-bit floats are tested in float32 before opset 20, where IsInf takes only float and double; the cast keeps infinity."""
    assert x.dtype is not None
    return g.cast(x, computed_in(g, "IsInf", x.dtype))


def _all_false(g: GraphBuilder, x: Value) -> Value:
    whole = g.cast(x, INT64)
    return g.op.Not(g.op.Equal(whole, whole))


def where(g: GraphBuilder, node: FxNode) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    condition, x, y = node.args
    return select(g, condition, x, y, node.dtype)


def masked_fill(g: GraphBuilder, node: FxNode) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor

    The value is converted to the tensor's dtype; there is no promotion.
    """
    x, mask, value = node.args
    return select(g, mask, value, x, node.dtype)


def heaviside(g: GraphBuilder, node: FxNode) -> Value:
    """heaviside(Tensor self, Tensor values) -> Tensor

    0 for NaN, as torch's kernel.
    """
    x, values = node.args
    dtype = node.dtype
    inner = computed_in(g, "Greater", dtype)
    x, zero = operands_in(g, x, 0, dtype=dtype, inner=inner)
    return select(g, g.op.Equal(x, zero), values, g.op.Greater(x, zero), dtype)


def nan_to_num(g: GraphBuilder, node: FxNode) -> Value:
    """nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor"""
    x, nan, high, low = node.args
    dtype = node.dtype
    if not dtype.is_floating_point():
        return x
    import ml_dtypes

    limits = ml_dtypes.finfo(dtype.numpy())
    zero = g.const(0.0, dtype)
    infinite = g.op.IsInf(_wide(g, x))
    top = g.const(float(limits.max) if high is None else high, dtype)
    bottom = g.const(float(limits.min) if low is None else low, dtype)
    bounded = g.op.Where(infinite, g.op.Where(g.op.Greater(x, zero), top, bottom), x)
    return g.op.Where(g.op.IsNaN(x), g.const(nan or 0.0, dtype), bounded)


def _both(name: str, converter: Converter) -> list[Rule]:
    return [Rule(f"aten::{name}.Tensor", converter), Rule(f"aten::{name}.Scalar", converter)]


RULES: list[Rule] = [
    *_both("eq", comparison("Equal")),
    *_both("ne", comparison("Equal", negate=True)),
    *_both("lt", comparison("Less")),
    *_both("gt", comparison("Greater")),
    *_both("le", comparison("LessOrEqual")),
    *_both("ge", comparison("GreaterOrEqual")),
    *[Rule(f"aten::logical_{op.lower()}.default", logical(op)) for op in ("And", "Or", "Xor")],
    Rule("aten::logical_not.default", logical_not),
    Rule("aten::isnan.default", isnan),
    Rule("aten::isinf.default", isinf),
    Rule("aten::isfinite.default", isfinite),
    *[Rule(f"aten::where.{overload}", where) for overload in ("self", "ScalarOther", "ScalarSelf", "Scalar")],
    Rule("onnxplug::selected", where),
    Rule("aten::masked_fill.Scalar", masked_fill),
    Rule("aten::masked_fill.Tensor", masked_fill),
    Rule("aten::heaviside.default", heaviside),
    Rule("aten::nan_to_num.default", nan_to_num),
]
