"""Elementary functions without cancellation: exponential, logarithmic, trigonometric and hyperbolic functions."""

from __future__ import annotations

import math

from ml_dtypes import finfo
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.runtimes import has_kernel


def is_negative(g: GraphBuilder, x: Value) -> Value:
    """Whether the sign bit of a float is set: true of -0.0 too. NaN counts as positive."""
    dtype = x.dtype
    assert dtype is not None
    zero = g.const(0.0, dtype)
    # The reciprocal has the sign of x, and is -inf for -0.0; ±inf are compared themselves.
    return g.op.Or(g.op.Less(x, zero), g.op.Less(g.op.Div(g.const(1.0, dtype), x), zero))


def with_sign(g: GraphBuilder, magnitude: Value, negative: Value) -> Value:
    """A non-negative magnitude with a sign, as a product, which keeps the sign of zero."""
    dtype = magnitude.dtype
    return g.op.Mul(magnitude, g.op.Where(negative, g.const(-1.0, dtype), g.const(1.0, dtype)))


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
    return g.op.Where(near, small, g.op.Sub(g.op.Exp(x), g.const(1.0, dtype)))


def log1p_of(g: GraphBuilder, x: Value) -> Value:
    """log(1 + x) without cancellation: log(u) x / (u - 1) with u = 1 + x (Higham, Accuracy and Stability, 1.14.1)."""
    dtype = x.dtype
    assert dtype is not None
    one = g.const(1.0, dtype)
    u = g.op.Add(one, x)
    # The divisor is finite, so that infinity over it is no NaN.
    divisor = g.op.Sub(g.op.Min(u, g.const(float(finfo(dtype.numpy()).max), dtype)), one)
    corrected = g.op.Mul(g.op.Log(u), g.op.Div(x, divisor))
    return g.op.Where(g.op.Equal(u, one), x, corrected)


def arctan(g: GraphBuilder, x: Value) -> Value:
    """atan(x): ONNX's own, or, where there is no kernel for doubles, by half-angle steps and the Taylor series."""
    dtype = x.dtype
    assert dtype is not None
    if has_kernel(g, "Atan", dtype):
        return g.op.Atan(x)
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
    zero, one, pi = g.const(0.0, dtype), g.const(1.0, dtype), g.const(math.pi, dtype)
    below, left = is_negative(g, y), is_negative(g, x)
    a, b = g.op.Abs(y), g.op.Abs(x)
    # Equal magnitudes, also infinite, have the quotient 1; two zeros have the angle 0.
    quotient = g.op.Where(g.op.Equal(a, b), one, g.op.Div(a, b))
    ratio = g.op.Where(g.op.Equal(g.op.Max(a, b), zero), zero, arctan(g, quotient))
    angle = g.op.Where(left, g.op.Sub(pi, ratio), ratio)
    return with_sign(g, angle, below)


def hypot_of(g: GraphBuilder, x: Value, y: Value) -> Value:
    """sqrt(x² + y²) without overflow; NaN where an operand is NaN, even if the other operand is infinite."""
    dtype = x.dtype
    assert dtype is not None
    one = g.const(1.0, dtype)
    a, b = g.op.Abs(x), g.op.Abs(y)
    top, low = g.op.Max(a, b), g.op.Min(a, b)
    # Equal magnitudes, also infinities and zeros, have the quotient 1.
    ratio = g.op.Where(g.op.Equal(top, low), one, g.op.Div(low, top))
    return g.op.Mul(top, g.op.Sqrt(g.op.Add(one, g.op.Mul(ratio, ratio))))


def hypot_exact(g: GraphBuilder, x: Value, y: Value) -> Value:
    """As :func:`hypot_of`, but infinite where one operand is infinite, even if the other operand is NaN."""
    infinite = g.op.Or(g.op.IsInf(x), g.op.IsInf(y))
    return g.op.Where(infinite, g.const(float("inf"), x.dtype), hypot_of(g, x, y))


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
    return g.op.Where(g.op.IsInf(e), g.op.Mul(g.op.Mul(half, root), root), value)


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
    return g.op.Where(g.op.Less(x, g.const(1.0, dtype)), g.const(float("nan"), dtype), value)


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
    return g.op.Sqrt(g.op.Mul(g.op.Sub(one, x), g.op.Add(one, x)))


def tangent(g: GraphBuilder, x: Value) -> Value:
    """sin(x) / cos(x)."""
    return g.op.Div(g.op.Sin(x), g.op.Cos(x))
