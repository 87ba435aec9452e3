"""Exponentials, logarithms, trigonometric and hyperbolic functions, and what has to do with signs and exponents."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters._promote import operand, operands
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_FLOAT, _DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def wide(dtype: ir.DataType) -> ir.DataType:
    """The dtype to compute in: halves in float."""
    return _FLOAT if dtype in _HALVES else dtype


def is_negative(g: GraphBuilder, x: Value) -> Value:
    """Whether the sign bit of a float is set: true of -0.0 too. NaN counts as positive."""
    dtype = x.dtype
    assert dtype is not None
    zero = g.const(0.0, dtype)
    # 1/-0.0 is -inf; elsewhere the sign of the reciprocal is that of x, but for ±inf, whose own sign tells.
    result: Value = g.op.Or(g.op.Less(x, zero), g.op.Less(g.op.Div(g.const(1.0, dtype), x), zero))
    return result


def with_sign(g: GraphBuilder, magnitude: Value, negative: Value) -> Value:
    """A non-negative magnitude with a sign. By a product: ONNX Runtime's Where turns -0.0 into 0.0."""
    dtype = magnitude.dtype
    result: Value = g.op.Mul(magnitude, g.op.Where(negative, g.const(-1.0, dtype), g.const(1.0, dtype)))
    return result


def expm1_of(g: GraphBuilder, x: Value) -> Value:
    """exp(x) - 1 without cancellation, in x's dtype (float or double).

    exp(x) - 1 = 2 sinh(x/2) exp(x/2) (Higham, Accuracy and Stability, 1.14.1), sinh by its series below |x| = 1.
    """
    dtype = x.dtype
    assert dtype is not None
    half = g.op.Mul(x, g.const(0.5, dtype))
    square = g.op.Mul(half, half)
    # Terms of sinh(h)/h - 1 up to h**14 at |h| <= 0.5: below the rounding of a double.
    series = g.const(0.0, dtype)
    for order in (15, 13, 11, 9, 7, 5, 3, 1):
        series = g.op.Add(g.op.Mul(series, square), g.const(1.0 / math.factorial(order), dtype))
    small = g.op.Mul(g.op.Mul(g.const(2.0, dtype), g.op.Mul(half, series)), g.op.Exp(half))
    near = g.op.Less(g.op.Abs(x), g.const(1.0, dtype))
    result: Value = g.op.Where(near, small, g.op.Sub(g.op.Exp(x), g.const(1.0, dtype)))
    return result


def log1p_of(g: GraphBuilder, x: Value) -> Value:
    """log(1 + x) without cancellation: log(u) x / (u - 1) with u = 1 + x (Higham, Accuracy and Stability, 1.14.1)."""
    dtype = x.dtype
    assert dtype is not None
    one = g.const(1.0, dtype)
    u = g.op.Add(one, x)
    corrected = g.op.Mul(g.op.Log(u), g.op.Div(x, g.op.Sub(u, one)))
    exact = g.op.Or(g.op.Equal(u, one), g.op.IsInf(x))
    # log1p(-inf) is NaN.
    result: Value = g.op.Where(exact, g.op.Where(g.op.Less(x, g.const(-1.0, dtype)), g.op.Log(x), x), corrected)
    return result


def arctan(g: GraphBuilder, x: Value) -> Value:
    """atan(x). ONNX Runtime has it in float alone; in double by two half-angle steps and the Taylor series."""
    dtype = x.dtype
    if dtype != _DOUBLE:
        result: Value = g.op.Atan(x)
        return result
    one = g.const(1.0, dtype)
    size = g.op.Abs(x)
    large = g.op.Greater(size, one)
    reduced = g.op.Where(large, g.op.Div(one, size), size)
    # tan(a/2) = t / (1 + sqrt(1 + t^2)): three times, so that |t| <= tan(pi/32).
    for _ in range(3):
        reduced = g.op.Div(reduced, g.op.Add(one, g.op.Sqrt(g.op.Add(one, g.op.Mul(reduced, reduced)))))
    square = g.op.Mul(reduced, reduced)
    series = g.const(0.0, dtype)
    for order in (17, 15, 13, 11, 9, 7, 5, 3, 1):
        sign = 1.0 if order % 4 == 1 else -1.0
        series = g.op.Add(g.op.Mul(series, square), g.const(sign / order, dtype))
    angle = g.op.Mul(g.op.Mul(reduced, series), g.const(8.0, dtype))
    angle = g.op.Where(large, g.op.Sub(g.const(math.pi / 2, dtype), angle), angle)
    return with_sign(g, angle, is_negative(g, x))


def arctan2(g: GraphBuilder, y: Value, x: Value) -> Value:
    """The angle of the point (x, y): signed zeros, infinities and NaN as C's atan2."""
    dtype = y.dtype
    assert dtype is not None
    zero, pi = g.const(0.0, dtype), g.const(math.pi, dtype)
    below, left = is_negative(g, y), is_negative(g, x)
    ratio = arctan(g, g.op.Div(g.op.Abs(y), g.op.Abs(x)))
    both_zero = g.op.And(g.op.Equal(y, zero), g.op.Equal(x, zero))
    infinite = g.op.And(g.op.IsInf(y), g.op.IsInf(x))
    ratio = g.op.Where(infinite, g.const(math.pi / 4, dtype), g.op.Where(both_zero, zero, ratio))
    angle = g.op.Where(left, g.op.Sub(pi, ratio), ratio)
    result = with_sign(g, angle, below)
    nan = g.op.Or(g.op.IsNaN(x), g.op.IsNaN(y))
    result = g.op.Where(nan, g.op.Add(x, y), result)
    return result


def hypot_of(g: GraphBuilder, x: Value, y: Value) -> Value:
    """sqrt(x² + y²) without overflow; infinite as soon as one of both is, even beside NaN."""
    dtype = x.dtype
    assert dtype is not None
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    a, b = g.op.Abs(x), g.op.Abs(y)
    top, low = g.op.Max(a, b), g.op.Min(a, b)
    ratio = g.op.Div(low, g.op.Where(g.op.Equal(top, zero), one, top))
    length = g.op.Mul(top, g.op.Sqrt(g.op.Add(one, g.op.Mul(ratio, ratio))))
    infinite = g.op.Or(g.op.IsInf(x), g.op.IsInf(y))
    result: Value = g.op.Where(infinite, g.const(float("inf"), dtype), length)
    return result


def sinh_of(g: GraphBuilder, x: Value) -> Value:
    """sinh(x) = (m + m / (m + 1)) / 2 with m = exp(|x|) - 1; the exponential is halved where it alone overflows."""
    dtype = x.dtype
    assert dtype is not None
    half, one = g.const(0.5, dtype), g.const(1.0, dtype)
    size = g.op.Abs(x)
    m = expm1_of(g, size)
    value = g.op.Mul(half, g.op.Add(m, g.op.Div(m, g.op.Add(m, one))))
    root = g.op.Exp(g.op.Mul(half, size))
    huge = g.op.Mul(g.op.Mul(half, root), root)
    value = g.op.Where(g.op.Greater(size, g.const(20.0, dtype)), huge, value)
    return with_sign(g, value, is_negative(g, x))


def cosh_of(g: GraphBuilder, x: Value) -> Value:
    """cosh(x) = (e + 1 / e) / 2 with e = exp(|x|), halved before it overflows."""
    dtype = x.dtype
    half = g.const(0.5, dtype)
    root = g.op.Exp(g.op.Mul(half, g.op.Abs(x)))
    e = g.op.Mul(root, root)
    value = g.op.Mul(half, g.op.Add(e, g.op.Div(g.const(1.0, dtype), e)))
    result: Value = g.op.Where(g.op.IsInf(e), g.op.Mul(g.op.Mul(half, root), root), value)
    return result


def asinh_of(g: GraphBuilder, x: Value) -> Value:
    """asinh(|x|) = log1p(a + a² / (1 + sqrt(1 + a²))), log(a) + log 2 where a² overflows; odd."""
    dtype = x.dtype
    one = g.const(1.0, dtype)
    size = g.op.Abs(x)
    square = g.op.Mul(size, size)
    near = log1p_of(g, g.op.Add(size, g.op.Div(square, g.op.Add(one, g.op.Sqrt(g.op.Add(one, square))))))
    far = g.op.Add(g.op.Log(size), g.const(math.log(2.0), dtype))
    value = g.op.Where(g.op.Greater(size, g.const(1e8, dtype)), far, near)
    return with_sign(g, value, is_negative(g, x))


def acosh_of(g: GraphBuilder, x: Value) -> Value:
    """acosh(x) = log1p(t + sqrt(2t + t²)) with t = x - 1, NaN below 1; log(x) + log 2 where t² overflows."""
    dtype = x.dtype
    t = g.op.Sub(x, g.const(1.0, dtype))
    near = log1p_of(g, g.op.Add(t, g.op.Sqrt(g.op.Mul(t, g.op.Add(t, g.const(2.0, dtype))))))
    far = g.op.Add(g.op.Log(x), g.const(math.log(2.0), dtype))
    value = g.op.Where(g.op.Greater(x, g.const(1e8, dtype)), far, near)
    result: Value = g.op.Where(g.op.Less(x, g.const(1.0, dtype)), g.const(float("nan"), dtype), value)
    return result


def atanh_of(g: GraphBuilder, x: Value) -> Value:
    """atanh(x) = log1p(2a / (1 - a)) / 2 with a = |x|; odd."""
    dtype = x.dtype
    size = g.op.Abs(x)
    ratio = g.op.Div(g.op.Mul(g.const(2.0, dtype), size), g.op.Sub(g.const(1.0, dtype), size))
    value = g.op.Mul(g.const(0.5, dtype), log1p_of(g, ratio))
    return with_sign(g, value, is_negative(g, x))


def arcsin(g: GraphBuilder, x: Value) -> Value:
    """asin(x) = atan2(x, sqrt((1 - x)(1 + x))), NaN outside [-1, 1]."""
    return arctan2(g, x, _cosine_of_arcsine(g, x))


def arccos(g: GraphBuilder, x: Value) -> Value:
    """acos(x) = atan2(sqrt((1 - x)(1 + x)), x), NaN outside [-1, 1]."""
    return arctan2(g, _cosine_of_arcsine(g, x), x)


def _cosine_of_arcsine(g: GraphBuilder, x: Value) -> Value:
    one = g.const(1.0, x.dtype)
    result: Value = g.op.Sqrt(g.op.Mul(g.op.Sub(one, x), g.op.Add(one, x)))
    return result


def tangent(g: GraphBuilder, x: Value) -> Value:
    """sin(x) / cos(x)."""
    result: Value = g.op.Div(g.op.Sin(x), g.op.Cos(x))
    return result


def by_formula(function: Any, native: str | None = None) -> Converter:
    """A converter for a formula on a float or double; by ONNX's own operator where its float kernel is exact enough."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = wide(node.dtype)
        x = operand(g, node.args[0], dtype)
        result = getattr(g.op, native)(x) if native is not None and dtype == _FLOAT else function(g, x)
        return g.cast(result, node.dtype)

    convert.__name__ = convert.__qualname__ = function.__name__.removesuffix("_of")
    return convert


def by_formula2(function: Any) -> Converter:
    """As :func:`by_formula`, of two operands."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = operands(g, *node.args[:2], dtype=wide(node.dtype))
        return g.cast(function(g, x, y), node.dtype)

    convert.__name__ = convert.__qualname__ = function.__name__.removesuffix("_of")
    return convert


def log_base(base: float) -> Converter:
    """A logarithm to another base: in double, so that powers of the base come out whole."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = operand(g, node.args[0], _DOUBLE)
        result: Value = g.op.Div(g.op.Log(x), g.const(math.log(base), _DOUBLE))
        return g.cast(result, node.dtype)

    convert.__name__ = convert.__qualname__ = f"log{int(base)}"
    return convert


def exp2(g: GraphBuilder, node: FxNode) -> Value:
    """exp2(Tensor self) -> Tensor

    A power of two with a whole exponent comes out exact.
    """
    dtype = wide(node.dtype)
    result: Value = g.op.Pow(g.const(2.0, dtype), operand(g, node.args[0], dtype))
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
        return g.cast(g.op.Mul(g.cast(x, ir.DataType.INT32), g.const(0, ir.DataType.INT32)), ir.DataType.BOOL)
    inner = ir.DataType.INT64 if x.dtype == ir.DataType.INT64 else ir.DataType.INT32
    result: Value = g.op.Less(g.cast(x, inner), g.const(0, inner))
    return result


def frexp(g: GraphBuilder, node: FxNode) -> list[Value]:
    """frexp.Tensor(Tensor self) -> (Tensor mantissa, Tensor exponent)

    The mantissa is in [0.5, 1). The exponent comes from the logarithm, then is put right by one where that was rounded;
    the division is by two powers of two, each of which is a normal number. 0, ±inf and NaN stay, with exponent 0.
    """
    x = g.cast(node.args[0], _DOUBLE)
    mantissa, exponent = frexp_of(g, x)
    return [g.cast(mantissa, node.dtype), g.cast(exponent, ir.DataType.INT32)]


def frexp_of(g: GraphBuilder, x: Value) -> tuple[Value, Value]:
    """Mantissa and exponent of doubles, both doubles."""
    one, half, zero = g.const(1.0, _DOUBLE), g.const(0.5, _DOUBLE), g.const(0.0, _DOUBLE)
    odd = g.op.Or(g.op.Or(g.op.IsNaN(x), g.op.IsInf(x)), g.op.Equal(x, zero))
    size = g.op.Where(odd, half, g.op.Abs(x))
    exponent = g.op.Floor(g.op.Div(g.op.Log(size), g.const(math.log(2.0), _DOUBLE)))
    first = g.op.Floor(g.op.Mul(exponent, half))
    two = g.const(2.0, _DOUBLE)
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


#: Bits of the mantissa with the leading one, and the exponent of the smallest normal number, in frexp's counting.
_PRECISION = {
    ir.DataType.FLOAT: (24, -125),
    ir.DataType.DOUBLE: (53, -1021),
    ir.DataType.BFLOAT16: (8, -125),
    ir.DataType.FLOAT16: (11, -13),
}


def nextafter(g: GraphBuilder, node: FxNode) -> Value:
    """nextafter(Tensor self, Tensor other) -> Tensor

    One unit in the last place towards the other: 2 ** (e - p) where x is m 2 ** e and m in [0.5, 1); half of it from a
    power of two towards zero. Computed in double, where the sum is exact for the narrower dtypes; a double's own sum is
    its neighbour by construction.
    """
    dtype = node.dtype
    x, y = operands(g, *node.args, dtype=_DOUBLE)
    bits, least = _PRECISION[dtype]
    zero, one = g.const(0.0, _DOUBLE), g.const(1.0, _DOUBLE)
    mantissa, exponent = frexp_of(g, g.op.Abs(x))
    inward = g.op.Less(g.op.Mul(g.op.Sub(y, x), g.op.Sign(x)), zero)
    power = g.op.And(g.op.Equal(mantissa, g.const(0.5, _DOUBLE)), inward)
    exponent = g.op.Sub(exponent, g.cast(power, _DOUBLE))
    exponent = g.op.Max(exponent, g.const(float(least), _DOUBLE))
    # In two factors: the smallest step of a double is no normal number.
    step = g.op.Mul(g.op.Pow(g.const(2.0, _DOUBLE), exponent), g.const(2.0**-bits, _DOUBLE))
    up = g.op.Greater(y, x)
    moved = g.op.Add(x, g.op.Mul(step, g.op.Where(up, one, g.op.Neg(one))))
    # From infinity the largest number; at zero the smallest, of y's sign.
    largest = g.const((2.0 - 2.0 ** (1 - bits)) * 2.0 ** (-least + 2), _DOUBLE)
    moved = g.op.Where(g.op.IsInf(x), g.op.Mul(g.op.Sign(x), largest), moved)
    tiny = g.const(2.0**-bits * 2.0**least, _DOUBLE)
    moved = g.op.Where(g.op.Equal(x, zero), g.op.Mul(g.op.Sign(y), tiny), moved)
    result = g.op.Where(g.op.Equal(x, y), y, moved)
    result = g.op.Where(g.op.Or(g.op.IsNaN(x), g.op.IsNaN(y)), g.op.Add(x, y), result)
    return g.cast(result, dtype)


def ldexp(g: GraphBuilder, node: FxNode) -> Value:
    """ldexp.Tensor(Tensor self, Tensor other) -> Tensor

    self times 2.0 ** other, the power in the result's dtype: that is how torch defines it.
    """
    dtype = wide(node.dtype)
    x, y = operands(g, *node.args, dtype=dtype)
    # The power first in the dtype of torch's pow(2.0, other), then the product.
    power = g.op.Pow(g.const(2.0, dtype), y)
    result: Value = g.op.Mul(x, power)
    return g.cast(result, node.dtype)


def logaddexp(base: float | None) -> Converter:
    """logaddexp, logaddexp2: max + log(1 + base ** -|x - y|); equal infinities give themselves."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = wide(node.dtype)
        x, y = operands(g, *node.args, dtype=dtype)
        scale = 1.0 if base is None else math.log(base)
        top = g.op.Max(x, y)
        gap = g.op.Neg(g.op.Abs(g.op.Sub(x, y)))
        rest = log1p_of(g, g.op.Exp(g.op.Mul(gap, g.const(scale, dtype))))
        total = g.op.Add(top, g.op.Div(rest, g.const(scale, dtype)))
        same = g.op.And(g.op.IsInf(x), g.op.Equal(x, y))
        result: Value = g.op.Where(same, x, total)
        return g.cast(result, node.dtype)

    convert.__name__ = convert.__qualname__ = "logaddexp" if base is None else "logaddexp2"
    return convert


def degrees(factor: float) -> Converter:
    """deg2rad, rad2deg: a product with a factor."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = wide(node.dtype)
        result: Value = g.op.Mul(operand(g, node.args[0], dtype), g.const(factor, dtype))
        return g.cast(result, node.dtype)

    convert.__name__ = convert.__qualname__ = "deg2rad" if factor < 1 else "rad2deg"
    return convert


def _named(names: str, convert: Converter) -> list[Rule]:
    return [Rule(f"aten::{name}.default", convert) for name in names.split()]


RULES: list[Rule] = [
    *_named("expm1 special_expm1", by_formula(expm1_of)),
    *_named("log1p special_log1p", by_formula(log1p_of)),
    *_named("exp2 special_exp2", exp2),
    *_named("log2", log_base(2.0)),
    *_named("log10", log_base(10.0)),
    *_named("atan arctan", by_formula(arctan, "Atan")),
    *_named("asin arcsin", by_formula(arcsin, "Asin")),
    *_named("acos arccos", by_formula(arccos, "Acos")),
    *_named("tan", by_formula(tangent, "Tan")),
    *_named("sinh", by_formula(sinh_of)),
    *_named("cosh", by_formula(cosh_of)),
    *_named("asinh arcsinh", by_formula(asinh_of)),
    *_named("acosh arccosh", by_formula(acosh_of)),
    *_named("atanh arctanh", by_formula(atanh_of)),
    *_named("atan2 arctan2", by_formula2(arctan2)),
    *_named("hypot", by_formula2(hypot_of)),
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
