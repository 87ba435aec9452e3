"""Exponentials, logarithms, trigonometric and hyperbolic functions, and functions of sign and exponent."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, FLOAT16, INT32
from onnxplug.converters.helpers.elementary import (
    acosh_of,
    arccos,
    arcsin,
    arctan,
    arctan2,
    asinh_of,
    atanh_of,
    cosh_of,
    expm1_of,
    hypot_exact,
    hypot_of,
    is_negative,
    log1p_of,
    sinh_of,
    tangent,
    with_sign,
)
from onnxplug.converters.helpers.exactness import INFINITE_BESIDE_NAN
from onnxplug.converters.helpers.promotion import operand, operands, wide
from onnxplug.converters.helpers.runtimes import computed_in, has_kernel
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def by_formula(function: Any) -> Converter:
    """A converter for a formula on a float or double."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = operand(g, node.args[0], wide(node.dtype))
        return g.cast(function(g, x), node.dtype)

    convert.__name__ = convert.__qualname__ = function.__name__
    return convert


def by_operator(op_type: str, function: Any) -> Converter:
    """A converter for one operator of ONNX; a formula serves doubles, for which the operator has no kernel."""
    by_its_formula = by_formula(function)

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        inner = computed_in(g, op_type, node.dtype)
        if not has_kernel(g, op_type, inner):
            result: Value = by_its_formula(g, node)
            return result
        return g.cast(getattr(g.op, op_type)(operand(g, node.args[0], inner)), node.dtype)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def by_formula2(function: Any) -> Converter:
    """As :func:`by_formula`, of two operands."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = operands(g, *node.args[:2], dtype=wide(node.dtype))
        return g.cast(function(g, x, y), node.dtype)

    convert.__name__ = convert.__qualname__ = function.__name__
    return convert


def log_base(base: float) -> Converter:
    """A logarithm to another base: computed in double, so that powers of the base give whole numbers."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = operand(g, node.args[0], DOUBLE)
        result = g.op.Div(g.op.Log(x), g.const(math.log(base), DOUBLE))
        return g.cast(result, node.dtype)

    convert.__name__ = convert.__qualname__ = f"log{int(base)}"
    return convert


def exp2(g: GraphBuilder, node: FxNode) -> Value:
    """exp2(Tensor self) -> Tensor

    The result is exact for whole exponents.
    """
    dtype = wide(node.dtype)
    result = g.op.Pow(g.const(2.0, dtype), operand(g, node.args[0], dtype))
    return g.cast(result, node.dtype)


def copysign(g: GraphBuilder, node: FxNode) -> Value:
    """copysign.Tensor(Tensor self, Tensor other) -> Tensor"""
    x, y = operands(g, *node.args, dtype=wide(node.dtype))
    return g.cast(with_sign(g, g.op.Abs(x), is_negative(g, y)), node.dtype)


def signbit(g: GraphBuilder, node: FxNode) -> Value:
    """signbit(Tensor self) -> Tensor"""
    x = node.args[0]
    if x.dtype.is_floating_point():
        return is_negative(g, g.cast(x, wide(x.dtype)))
    if not x.dtype.is_signed():
        return g.cast(g.op.Mul(g.cast(x, INT32), g.const(0, INT32)), BOOL)
    inner = computed_in(g, "Less", x.dtype)
    return g.op.Less(g.cast(x, inner), g.const(0, inner))


def frexp(g: GraphBuilder, node: FxNode) -> list[Value]:
    """frexp.Tensor(Tensor self) -> (Tensor mantissa, Tensor exponent)

    The mantissa is in [0.5, 1). The exponent is computed from the logarithm, and corrected by 1 where that was
    rounded; the division is by two powers of two, each of which is a normal number. For 0, ±inf and NaN the mantissa is
    the number itself and the exponent is 0.
    """
    x = g.cast(node.args[0], DOUBLE)
    mantissa, exponent = frexp_of(g, x)
    return [g.cast(mantissa, node.dtype), g.cast(exponent, INT32)]


def frexp_of(g: GraphBuilder, x: Value) -> tuple[Value, Value]:
    """Mantissa and exponent of doubles, both doubles."""
    one, half, zero = g.const(1.0, DOUBLE), g.const(0.5, DOUBLE), g.const(0.0, DOUBLE)
    odd = g.op.Or(g.op.Or(g.op.IsNaN(x), g.op.IsInf(x)), g.op.Equal(x, zero))
    size = g.op.Where(odd, half, g.op.Abs(x))
    exponent = g.op.Floor(g.op.Div(g.op.Log(size), g.const(math.log(2.0), DOUBLE)))
    first = g.op.Floor(g.op.Mul(exponent, half))
    two = g.const(2.0, DOUBLE)
    mantissa = g.op.Div(g.op.Div(size, g.op.Pow(two, first)), g.op.Pow(two, g.op.Sub(exponent, first)))
    for _ in range(2):
        over = g.op.GreaterOrEqual(mantissa, one)
        mantissa = g.op.Where(over, g.op.Mul(mantissa, half), mantissa)
        exponent = g.op.Where(over, g.op.Add(exponent, one), exponent)
    under = g.op.Less(mantissa, half)
    mantissa = g.op.Where(under, g.op.Mul(mantissa, two), mantissa)
    exponent = g.op.Where(under, g.op.Sub(exponent, one), exponent)
    signed = with_sign(g, mantissa, g.op.Less(x, zero))
    mantissa = g.op.Where(odd, x, signed)
    exponent = g.op.Where(odd, zero, exponent)
    return mantissa, exponent


#: Bits of the mantissa including the leading 1, and the exponent of the smallest normal number, in frexp's counting.
_PRECISION = {
    FLOAT: (24, -125),
    DOUBLE: (53, -1021),
    ir.DataType.BFLOAT16: (8, -125),
    FLOAT16: (11, -13),
}


def nextafter(g: GraphBuilder, node: FxNode) -> Value:
    """nextafter(Tensor self, Tensor other) -> Tensor

    One unit in the last place towards the other: 2 ** (e - p) where x is m 2 ** e and m in [0.5, 1); half of it from a
    power of two towards zero. Computed in double, where the sum is exact for the narrower dtypes; a double's own sum is
    its neighbour by construction.
    """
    dtype = node.dtype
    x, y = operands(g, *node.args, dtype=DOUBLE)
    bits, least = _PRECISION[dtype]
    zero, one = g.const(0.0, DOUBLE), g.const(1.0, DOUBLE)
    mantissa, exponent = frexp_of(g, g.op.Abs(x))
    inward = g.op.Less(g.op.Mul(g.op.Sub(y, x), g.op.Sign(x)), zero)
    power = g.op.And(g.op.Equal(mantissa, g.const(0.5, DOUBLE)), inward)
    exponent = g.op.Sub(exponent, g.cast(power, DOUBLE))
    exponent = g.op.Max(exponent, g.const(float(least), DOUBLE))
    # Two factors, because the smallest step of a double is subnormal.
    step = g.op.Mul(g.op.Pow(g.const(2.0, DOUBLE), exponent), g.const(2.0**-bits, DOUBLE))
    up = g.op.Greater(y, x)
    moved = g.op.Add(x, g.op.Mul(step, g.op.Where(up, one, g.op.Neg(one))))
    # The neighbour of infinity is the largest number, the neighbour of zero the smallest number with y's sign.
    largest = g.const((2.0 - 2.0 ** (1 - bits)) * 2.0 ** (-least + 2), DOUBLE)
    moved = g.op.Where(g.op.IsInf(x), g.op.Mul(g.op.Sign(x), largest), moved)
    tiny = g.const(2.0**-bits * 2.0**least, DOUBLE)
    moved = g.op.Where(g.op.Equal(x, zero), g.op.Mul(g.op.Sign(y), tiny), moved)
    result = g.op.Where(g.op.Equal(x, y), y, moved)
    result = g.op.Where(g.op.Or(g.op.IsNaN(x), g.op.IsNaN(y)), g.op.Add(x, y), result)
    return g.cast(result, dtype)


def ldexp(g: GraphBuilder, node: FxNode) -> Value:
    """ldexp.Tensor(Tensor self, Tensor other) -> Tensor

    self times 2.0 ** other. The product of a float and an integer power does not overflow before the result does: torch
    takes C's ldexp there.
    """
    x, y = node.args
    if x.dtype.is_floating_point() and y.dtype.is_integer():
        return g.cast(_scaled_by_power(g, g.cast(x, DOUBLE), g.cast(y, DOUBLE), node.dtype), node.dtype)
    dtype = wide(node.dtype)
    x, y = operands(g, x, y, dtype=dtype)
    return g.cast(g.op.Mul(x, g.op.Pow(g.const(2.0, dtype), y)), node.dtype)


def _scaled_by_power(g: GraphBuilder, x: Value, exponent: Value, dtype: ir.DataType) -> Value:
    """Numbers of ``dtype``, held as doubles, times a power of two whose exponent is a whole number.

    Beyond its bounds the power makes 0 or an infinity of every other number, and is kept finite and above 0 for these.
    """
    two = g.const(2.0, DOUBLE)
    if dtype != DOUBLE:
        return g.op.Mul(x, g.op.Pow(two, g.op.Clip(exponent, g.const(-400.0, DOUBLE), g.const(400.0, DOUBLE))))
    exponent = g.op.Clip(exponent, g.const(-2200.0, DOUBLE), g.const(2200.0, DOUBLE))
    # Three factors, since 2.0 ** 1024 is infinite.
    part = g.op.Floor(g.op.Div(exponent, g.const(3.0, DOUBLE)))
    factor = g.op.Pow(two, part)
    rest = g.op.Pow(two, g.op.Sub(exponent, g.op.Add(part, part)))
    return g.op.Mul(g.op.Mul(g.op.Mul(x, factor), factor), rest)


def logaddexp(base: float | None) -> Converter:
    """logaddexp, logaddexp2: max + log(1 + base ** -|x - y|); two equal infinities give that infinity."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = wide(node.dtype)
        x, y = operands(g, *node.args, dtype=dtype)
        scale = 1.0 if base is None else math.log(base)
        # The difference of equal infinities is NaN.
        difference = g.op.Where(g.op.Equal(x, y), g.const(0.0, dtype), g.op.Sub(x, y))
        gap = g.op.Neg(g.op.Abs(difference))
        rest = log1p_of(g, g.op.Exp(g.op.Mul(gap, g.const(scale, dtype))))
        total = g.op.Add(g.op.Max(x, y), g.op.Div(rest, g.const(scale, dtype)))
        return g.cast(total, node.dtype)

    convert.__name__ = convert.__qualname__ = "logaddexp" if base is None else "logaddexp2"
    return convert


def degrees(factor: float) -> Converter:
    """deg2rad, rad2deg: a product with a factor."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = wide(node.dtype)
        result = g.op.Mul(operand(g, node.args[0], dtype), g.const(factor, dtype))
        return g.cast(result, node.dtype)

    convert.__name__ = convert.__qualname__ = "deg2rad" if factor < 1 else "rad2deg"
    return convert


def _named(names: str, convert: Converter, **conditions: Any) -> list[Rule]:
    return [Rule(f"aten::{name}.default", convert, **conditions) for name in names.split()]


RULES: list[Rule] = [
    *_named("expm1 special_expm1", by_formula(expm1_of)),
    *_named("log1p special_log1p", by_formula(log1p_of)),
    *_named("exp2 special_exp2", exp2),
    *_named("log2", log_base(2.0)),
    *_named("log10", log_base(10.0)),
    *_named("atan arctan", by_operator("Atan", arctan)),
    *_named("asin arcsin", by_operator("Asin", arcsin)),
    *_named("acos arccos", by_operator("Acos", arccos)),
    *_named("tan", by_operator("Tan", tangent)),
    *_named("sinh", by_operator("Sinh", sinh_of)),
    *_named("cosh", by_operator("Cosh", cosh_of)),
    *_named("asinh arcsinh", by_operator("Asinh", asinh_of)),
    *_named("acosh arccosh", by_operator("Acosh", acosh_of)),
    *_named("atanh arctanh", by_operator("Atanh", atanh_of)),
    *_named("atan2 arctan2", by_formula2(arctan2)),
    *_named("hypot", by_formula2(hypot_of)),
    *_named("hypot", by_formula2(hypot_exact), **INFINITE_BESIDE_NAN),
    *_named("logaddexp", logaddexp(None)),
    *_named("logaddexp2", logaddexp(2.0)),
    *_named("deg2rad", degrees(math.pi / 180)),
    *_named("rad2deg", degrees(180 / math.pi)),
    Rule("aten::copysign.Tensor", copysign),
    Rule("aten::copysign.Scalar", copysign),
    Rule("aten::signbit.default", signbit),
    Rule("aten::frexp.Tensor", frexp),
    Rule("aten::ldexp.Tensor", ldexp),
    Rule("aten::nextafter.default", nextafter),
]
