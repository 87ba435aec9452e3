"""Elementary functions of complex numbers held as two real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.converters.helpers.complex_pairs import (
    c_abs,
    c_angle,
    c_mul,
    c_neg,
    c_over_i,
    c_reciprocal,
    c_scale,
    c_times_i,
)
from onnxplug.converters.helpers.elementary import (
    arctan2,
    asinh_of,
    cosh_of,
    expm1_of,
    is_negative,
    log1p_of,
    sinh_of,
    with_sign,
)


def _times_sine(g: GraphBuilder, size: Any, angle: Any) -> Any:
    """A number times the sine of an angle, 0 of the angle 0 also where the number is infinite."""
    flat = g.op.Equal(angle, g.const(0.0, angle.dtype))
    return g.op.Where(flat, angle, g.op.Mul(size, g.op.Sin(angle)))


def c_exp(g: GraphBuilder, x: Complex) -> Complex:
    """exp(a) (cos b + i sin b); the result of a real argument is real, also where exp(a) is infinite."""
    size = g.op.Exp(x.real)
    return Complex(g.op.Mul(size, g.op.Cos(x.imag)), _times_sine(g, size, x.imag))


def c_expm1(g: GraphBuilder, x: Complex) -> Complex:
    """exp(z) - 1 without cancellation at small z: the real part is (exp(a) - 1) cos b - 2 sin²(b/2)."""
    dtype = x.real.dtype
    sine = g.op.Sin(g.op.Mul(x.imag, g.const(0.5, dtype)))
    less = g.op.Mul(g.const(2.0, dtype), g.op.Mul(sine, sine))
    real = g.op.Sub(g.op.Mul(expm1_of(g, x.real), g.op.Cos(x.imag)), less)
    return Complex(real, _times_sine(g, g.op.Exp(x.real), x.imag))


def c_log(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Log(c_abs(g, x)), c_angle(g, x))


def c_log1p(g: GraphBuilder, x: Complex) -> Complex:
    """log(1 + z); where |1 + z| is near 1 the real part is log1p(|1 + z|² - 1) / 2, of the difference a (2 + a) + b²."""
    dtype = x.real.dtype
    more = Complex(g.op.Add(x.real, g.const(1.0, dtype)), x.imag)
    gap = g.op.Mul(x.real, g.op.Add(x.real, g.const(2.0, dtype)))
    gap = g.op.Add(gap, g.op.Mul(x.imag, x.imag))
    near = g.op.Less(g.op.Abs(gap), g.const(0.5, dtype))
    far = c_log(g, more)
    return Complex(g.op.Where(near, g.op.Mul(g.const(0.5, dtype), log1p_of(g, gap)), far.real), far.imag)


def c_sqrt(g: GraphBuilder, x: Complex) -> Complex:
    """t = sqrt((|a| + |z|) / 2) is one part, b / 2t the other: no cancellation (Kahan 1987)."""
    dtype = x.real.dtype
    zero, one, half = g.const(0.0, dtype), g.const(1.0, dtype), g.const(0.5, dtype)
    size = g.op.Abs(x.real)
    t = g.op.Sqrt(g.op.Add(g.op.Mul(half, size), g.op.Mul(half, c_abs(g, x))))
    is_zero = g.op.Equal(t, zero)
    other = g.op.Div(g.op.Abs(x.imag), g.op.Mul(g.const(2.0, dtype), g.op.Where(is_zero, one, t)))
    other = g.op.Where(is_zero, zero, other)
    right = g.op.GreaterOrEqual(x.real, zero)
    imag = g.op.Where(right, other, t)
    return Complex(g.op.Where(right, t, other), with_sign(g, imag, is_negative(g, x.imag)))


def c_sinh(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Mul(sinh_of(g, x.real), g.op.Cos(x.imag)), _times_sine(g, cosh_of(g, x.real), x.imag))


def c_cosh(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Mul(cosh_of(g, x.real), g.op.Cos(x.imag)), _times_sine(g, sinh_of(g, x.real), x.imag))


def c_tanh(g: GraphBuilder, x: Complex) -> Complex:
    """Kahan (1987): with s = sinh a, t = tan b: (s rho beta + i t) / (1 + beta s²), rho² = 1 + s², beta = 1 + t²."""
    dtype = x.real.dtype
    one = g.const(1.0, dtype)
    # The argument is clipped to |a| <= 20, beyond which the result is ±1, so that s² does not overflow.
    bounded = g.op.Clip(x.real, g.const(-20.0, dtype), g.const(20.0, dtype))
    s = sinh_of(g, bounded)
    t = g.op.Div(g.op.Sin(x.imag), g.op.Cos(x.imag))
    beta = g.op.Add(one, g.op.Mul(t, t))
    square = g.op.Mul(s, s)
    below = g.op.Add(one, g.op.Mul(beta, square))
    real = g.op.Div(g.op.Mul(g.op.Mul(beta, g.op.Sqrt(g.op.Add(one, square))), s), below)
    return Complex(real, g.op.Div(t, below))


def c_asinh(g: GraphBuilder, x: Complex) -> Complex:
    return c_over_i(g, c_asin(g, c_times_i(g, x)))


def _roots(g: GraphBuilder, x: Complex) -> tuple[Complex, Complex]:
    """sqrt(1 - z) and sqrt(1 + z)."""
    one = g.const(1.0, x.real.dtype)
    return (
        c_sqrt(g, Complex(g.op.Sub(one, x.real), g.op.Neg(x.imag))),
        c_sqrt(g, Complex(g.op.Add(one, x.real), x.imag)),
    )


def c_asin(g: GraphBuilder, x: Complex) -> Complex:
    """Kahan (1987): the parts of asin from those of sqrt(1 - z) and sqrt(1 + z)."""
    minus, plus = _roots(g, x)
    product = g.op.Sub(g.op.Mul(minus.real, plus.real), g.op.Mul(minus.imag, plus.imag))
    cross = g.op.Sub(g.op.Mul(minus.real, plus.imag), g.op.Mul(minus.imag, plus.real))
    return Complex(arctan2(g, x.real, product), asinh_of(g, cross))


def c_acos(g: GraphBuilder, x: Complex) -> Complex:
    """Kahan (1987)."""
    minus, plus = _roots(g, x)
    cross = g.op.Sub(g.op.Mul(plus.real, minus.imag), g.op.Mul(plus.imag, minus.real))
    angle = g.op.Mul(g.const(2.0, x.real.dtype), arctan2(g, minus.real, plus.real))
    return Complex(angle, asinh_of(g, cross))


def c_acosh(g: GraphBuilder, x: Complex) -> Complex:
    """Kahan (1987), from sqrt(z - 1) and sqrt(z + 1)."""
    dtype = x.real.dtype
    one = g.const(1.0, dtype)
    minus = c_sqrt(g, Complex(g.op.Sub(x.real, one), x.imag))
    plus = c_sqrt(g, Complex(g.op.Add(x.real, one), x.imag))
    product = g.op.Add(g.op.Mul(minus.real, plus.real), g.op.Mul(minus.imag, plus.imag))
    return Complex(asinh_of(g, product), g.op.Mul(g.const(2.0, dtype), arctan2(g, minus.imag, plus.real)))


def c_atanh(g: GraphBuilder, x: Complex) -> Complex:
    """Real part log1p(4a / ((1 - a)² + b²)) / 4 of a >= 0 and odd, imaginary part atan2(2b, (1 - a)(1 + a) - b²) / 2."""
    dtype = x.real.dtype
    one, two, four = (g.const(v, dtype) for v in (1.0, 2.0, 4.0))
    size = g.op.Abs(x.real)
    less = g.op.Sub(one, size)
    square = g.op.Mul(x.imag, x.imag)
    real = log1p_of(g, g.op.Div(g.op.Mul(four, size), g.op.Add(g.op.Mul(less, less), square)))
    below = g.op.Sub(g.op.Mul(less, g.op.Add(one, size)), square)
    return Complex(
        with_sign(g, g.op.Mul(g.const(0.25, dtype), real), is_negative(g, x.real)),
        g.op.Mul(g.const(0.5, dtype), arctan2(g, g.op.Mul(two, x.imag), below)),
    )


def via_i(function: Callable[[GraphBuilder, Complex], Complex], *, back: bool = True) -> Any:
    """f(z) from its hyperbolic twin h at iz: h(iz), over i where ``back``."""

    def convert(g: GraphBuilder, x: Complex) -> Complex:
        result = function(g, c_times_i(g, x))
        return c_over_i(g, result) if back else result

    return convert


def c_pow(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    """exp(y log x). Of a base of 0 it is 0 where y has a positive real part, inf + NaN i a negative one, and NaN otherwise."""
    zero = g.const(0.0, x.real.dtype)
    exponent = c_mul(g, y, c_log(g, x))
    result = c_exp(g, exponent)
    no_base = g.op.And(g.op.Equal(x.real, zero), g.op.Equal(x.imag, zero))
    # The imaginary part of the exponent is NaN there.
    size = g.op.Exp(exponent.real)
    return Complex(g.op.Where(no_base, size, result.real), g.op.Where(no_base, g.op.Mul(size, zero), result.imag))


def c_sigmoid(g: GraphBuilder, x: Complex) -> Complex:
    """1 / (1 + exp(-z))"""
    e = c_exp(g, c_neg(g, x))
    return c_reciprocal(g, Complex(g.op.Add(e.real, g.const(1.0, e.real.dtype)), e.imag))


def c_log_base(base: float) -> Any:
    def convert(g: GraphBuilder, x: Complex) -> Complex:
        return c_scale(g, c_log(g, x), g.const(1.0 / math.log(base), x.real.dtype))

    return convert
