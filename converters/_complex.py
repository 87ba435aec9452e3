"""The algebra of complex numbers held as two real tensors: elementary functions on :class:`Complex`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex, complex_constant
from onnxplug.converters.exponential import (
    arctan2,
    asinh_of,
    cosh_of,
    hypot_of,
    is_negative,
    log1p_of,
    sinh_of,
    with_sign,
)


def as_complex(g: GraphBuilder, x: Any, dtype: ir.DataType) -> Complex:
    """An operand as a complex tensor whose parts have ``dtype``: complex, real, or a Python number."""
    if isinstance(x, Complex):
        return Complex(g.cast(x.real, dtype), g.cast(x.imag, dtype))
    if isinstance(x, Value):
        real = g.cast(x, dtype)
        return Complex(real, g.op.Mul(real, g.const(0.0, dtype)) if x.dtype is None else _zeros_like(g, real))
    return complex_constant(g, x, dtype)


def _zeros_like(g: GraphBuilder, x: Value) -> Value:
    """Zeros of a value's shape; not its product with zero, which NaN and ±inf would survive."""
    assert x.dtype is not None
    if x.shape is not None and all(isinstance(d, int) for d in x.shape):
        import numpy as np

        return g.const(np.zeros(x.shape.numpy(), dtype=x.dtype.numpy()))
    result: Value = g.op.Expand(g.const(0.0, x.dtype), g.shape(x))
    return result


# -- arithmetic of pairs -----------------------------------------------------------------------------------------------


def c_add(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    return Complex(g.op.Add(x.real, y.real), g.op.Add(x.imag, y.imag))


def c_sub(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    return Complex(g.op.Sub(x.real, y.real), g.op.Sub(x.imag, y.imag))


def c_mul(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    return bilinear(g, g.op.Mul, x, y)


def bilinear(g: GraphBuilder, product: Callable[..., Value], x: Complex, y: Complex) -> Complex:
    """A product of any kind of two complex tensors: four products of real ones."""
    return Complex(
        g.op.Sub(product(x.real, y.real), product(x.imag, y.imag)),
        g.op.Add(product(x.real, y.imag), product(x.imag, y.real)),
    )


def c_scale(g: GraphBuilder, x: Complex, factor: Value) -> Complex:
    return Complex(g.op.Mul(x.real, factor), g.op.Mul(x.imag, factor))


def c_neg(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Neg(x.real), g.op.Neg(x.imag))


def c_conj(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(x.real, g.op.Neg(x.imag))


def c_times_i(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Neg(x.imag), x.real)


def c_over_i(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(x.imag, g.op.Neg(x.real))


def c_div(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    """Smith's algorithm (Robust Complex Division, 1962), which torch uses too: no overflow of |y|²."""
    dtype = x.real.dtype
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    wide = g.op.GreaterOrEqual(g.op.Abs(y.real), g.op.Abs(y.imag))
    large, small = g.op.Where(wide, y.real, y.imag), g.op.Where(wide, y.imag, y.real)
    nothing = g.op.Equal(large, zero)
    ratio = g.op.Where(nothing, zero, g.op.Div(small, g.op.Where(nothing, one, large)))
    scale = g.op.Div(one, g.op.Add(g.op.Where(nothing, g.op.Abs(large), large), g.op.Mul(small, ratio)))
    top = g.op.Where(wide, g.op.Add(x.real, g.op.Mul(x.imag, ratio)), g.op.Add(g.op.Mul(x.real, ratio), x.imag))
    low = g.op.Where(wide, g.op.Sub(x.imag, g.op.Mul(x.real, ratio)), g.op.Sub(g.op.Mul(x.imag, ratio), x.real))
    return Complex(g.op.Mul(top, scale), g.op.Mul(low, scale))


def c_abs(g: GraphBuilder, x: Complex) -> Value:
    return hypot_of(g, x.real, x.imag)


def c_angle(g: GraphBuilder, x: Complex) -> Value:
    return arctan2(g, x.imag, x.real)


def c_exp(g: GraphBuilder, x: Complex) -> Complex:
    """exp(a) (cos b + i sin b); a real argument stays real, exp(a) infinite or not."""
    size = g.op.Exp(x.real)
    flat = g.op.Equal(x.imag, g.const(0.0, x.imag.dtype))
    return Complex(g.op.Mul(size, g.op.Cos(x.imag)), g.op.Where(flat, x.imag, g.op.Mul(size, g.op.Sin(x.imag))))


def c_log(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Log(c_abs(g, x)), c_angle(g, x))


def c_sqrt(g: GraphBuilder, x: Complex) -> Complex:
    """t = sqrt((|a| + |z|) / 2) is one part, b / 2t the other: no difference of like numbers. (Kahan 1987)"""
    dtype = x.real.dtype
    zero, one, half = g.const(0.0, dtype), g.const(1.0, dtype), g.const(0.5, dtype)
    size = g.op.Abs(x.real)
    t = g.op.Sqrt(g.op.Add(g.op.Mul(half, size), g.op.Mul(half, c_abs(g, x))))
    nothing = g.op.Equal(t, zero)
    other = g.op.Div(g.op.Abs(x.imag), g.op.Mul(g.const(2.0, dtype), g.op.Where(nothing, one, t)))
    other = g.op.Where(nothing, zero, other)
    right = g.op.GreaterOrEqual(x.real, zero)
    imag = g.op.Where(right, other, t)
    return Complex(g.op.Where(right, t, other), with_sign(g, imag, is_negative(g, x.imag)))


def c_sinh(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Mul(sinh_of(g, x.real), g.op.Cos(x.imag)), g.op.Mul(cosh_of(g, x.real), g.op.Sin(x.imag)))


def c_cosh(g: GraphBuilder, x: Complex) -> Complex:
    return Complex(g.op.Mul(cosh_of(g, x.real), g.op.Cos(x.imag)), g.op.Mul(sinh_of(g, x.real), g.op.Sin(x.imag)))


def c_tanh(g: GraphBuilder, x: Complex) -> Complex:
    """Kahan (1987): with s = sinh a, t = tan b: (s rho beta + i t) / (1 + beta s²), rho² = 1 + s², beta = 1 + t²."""
    dtype = x.real.dtype
    one = g.const(1.0, dtype)
    # Beyond |a| = 20 the real part is ±1 and the imaginary one vanishes: held there, s² does not overflow.
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
    """Real part log1p(4a / ((1 - a)² + b²)) / 4, imaginary part atan2(2b, (1 - a)(1 + a) - b²) / 2."""
    dtype = x.real.dtype
    one, two, four = (g.const(v, dtype) for v in (1.0, 2.0, 4.0))
    less = g.op.Sub(one, x.real)
    square = g.op.Mul(x.imag, x.imag)
    real = log1p_of(g, g.op.Div(g.op.Mul(four, x.real), g.op.Add(g.op.Mul(less, less), square)))
    below = g.op.Sub(g.op.Mul(less, g.op.Add(one, x.real)), square)
    return Complex(
        g.op.Mul(g.const(0.25, dtype), real),
        g.op.Mul(g.const(0.5, dtype), arctan2(g, g.op.Mul(two, x.imag), below)),
    )


def via_i(function: Callable[[GraphBuilder, Complex], Complex], *, back: bool = True) -> Any:
    """f(z) from its hyperbolic twin h at iz: h(iz), over i where ``back``."""

    def convert(g: GraphBuilder, x: Complex) -> Complex:
        result = function(g, c_times_i(g, x))
        return c_over_i(g, result) if back else result

    return convert


def c_pow(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    """exp(y log x); 0 to a power is 0, to the power 0 it is 1."""
    dtype = x.real.dtype
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    result = c_exp(g, c_mul(g, y, c_log(g, x)))
    no_base = g.op.And(g.op.Equal(x.real, zero), g.op.Equal(x.imag, zero))
    no_power = g.op.And(g.op.Equal(y.real, zero), g.op.Equal(y.imag, zero))
    real = g.op.Where(no_power, one, g.op.Where(no_base, zero, result.real))
    imag = g.op.Where(g.op.Or(no_power, no_base), zero, result.imag)
    return Complex(real, imag)


def c_reciprocal(g: GraphBuilder, x: Complex) -> Complex:
    dtype = x.real.dtype
    return c_div(g, Complex(g.const(1.0, dtype), g.const(0.0, dtype)), x)


def c_sgn(g: GraphBuilder, x: Complex) -> Complex:
    """z / |z|, 0 of 0."""
    dtype = x.real.dtype
    size = c_abs(g, x)
    nothing = g.op.Equal(size, g.const(0.0, dtype))
    size = g.op.Where(nothing, g.const(1.0, dtype), size)
    return Complex(g.op.Div(x.real, size), g.op.Div(x.imag, size))


def c_sigmoid(g: GraphBuilder, x: Complex) -> Complex:
    """1 / (1 + exp(-z))"""
    e = c_exp(g, c_neg(g, x))
    return c_reciprocal(g, Complex(g.op.Add(e.real, g.const(1.0, e.real.dtype)), e.imag))


def c_log_base(base: float) -> Any:
    def convert(g: GraphBuilder, x: Complex) -> Complex:
        return c_scale(g, c_log(g, x), g.const(1.0 / math.log(base), x.real.dtype))

    return convert
