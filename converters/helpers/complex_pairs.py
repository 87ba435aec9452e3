"""Arithmetic of complex numbers held as two real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import PART_DTYPE, Complex, complex_constant
from onnxplug.converters.helpers.dtypes import BOOL
from onnxplug.converters.helpers.elementary import arctan2, hypot_of
from onnxplug.converters.helpers.promotion import operand
from onnxplug.interpret.node import FxNode


def as_complex(g: GraphBuilder, x: Any, dtype: ir.DataType) -> Complex:
    """An operand as a complex tensor whose parts have ``dtype``: complex, real, or a Python number."""
    if isinstance(x, Complex):
        return Complex(g.cast(x.real, dtype), g.cast(x.imag, dtype))
    if isinstance(x, Value):
        real = g.cast(x, dtype)
        return Complex(real, g.op.Mul(real, g.const(0.0, dtype)) if x.dtype is None else _zeros_like(g, real))
    return complex_constant(g, x, dtype)


def _zeros_like(g: GraphBuilder, x: Value) -> Value:
    """Zeros of a value's shape. A product with zero would keep NaN and turn ±inf into NaN."""
    assert x.dtype is not None
    if x.shape is not None and all(isinstance(d, int) for d in x.shape):
        import numpy as np

        return g.const(np.zeros(x.shape.numpy(), dtype=x.dtype.numpy()))
    return g.op.Expand(g.const(0.0, x.dtype), g.shape(x))


def c_add(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    return Complex(g.op.Add(x.real, y.real), g.op.Add(x.imag, y.imag))


def c_sub(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    return Complex(g.op.Sub(x.real, y.real), g.op.Sub(x.imag, y.imag))


def c_mul(g: GraphBuilder, x: Complex, y: Complex) -> Complex:
    return bilinear(g, g.op.Mul, x, y)


def bilinear(g: GraphBuilder, product: Callable[..., Value], x: Complex, y: Complex) -> Complex:
    """A bilinear operation on two complex tensors, as four operations on real tensors."""
    return Complex(
        g.op.Sub(product(x.real, y.real), product(x.imag, y.imag)),
        g.op.Add(product(x.real, y.imag), product(x.imag, y.real)),
    )


def c_scale(g: GraphBuilder, x: Complex, factor: Value) -> Complex:
    return Complex(g.op.Mul(x.real, factor), g.op.Mul(x.imag, factor))


def c_times(g: GraphBuilder, x: Complex, number: Any) -> Complex:
    """Times a number: a real or symbolic one scales both parts, 1 neither; a product with 0 i would be NaN of infinities."""
    dtype = x.real.dtype
    assert dtype is not None
    if isinstance(number, complex) and number.imag:
        return c_mul(g, x, complex_constant(g, number, dtype))
    number = number.real if isinstance(number, complex) else number
    return x if not isinstance(number, Value) and number == 1 else c_scale(g, x, operand(g, number, dtype))


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
    is_zero = g.op.Equal(large, zero)
    ratio = g.op.Where(is_zero, zero, g.op.Div(small, g.op.Where(is_zero, one, large)))
    scale = g.op.Div(one, g.op.Add(g.op.Where(is_zero, g.op.Abs(large), large), g.op.Mul(small, ratio)))
    top = g.op.Where(wide, g.op.Add(x.real, g.op.Mul(x.imag, ratio)), g.op.Add(g.op.Mul(x.real, ratio), x.imag))
    low = g.op.Where(wide, g.op.Sub(x.imag, g.op.Mul(x.real, ratio)), g.op.Sub(g.op.Mul(x.imag, ratio), x.real))
    return Complex(g.op.Mul(top, scale), g.op.Mul(low, scale))


def c_reciprocal(g: GraphBuilder, x: Complex) -> Complex:
    dtype = x.real.dtype
    return c_div(g, Complex(g.const(1.0, dtype), g.const(0.0, dtype)), x)


def c_abs(g: GraphBuilder, x: Complex) -> Value:
    return hypot_of(g, x.real, x.imag)


def c_angle(g: GraphBuilder, x: Complex) -> Value:
    return arctan2(g, x.imag, x.real)


def c_sgn(g: GraphBuilder, x: Complex) -> Complex:
    """z / |z|, and 0 where z is 0."""
    dtype = x.real.dtype
    size = c_abs(g, x)
    is_zero = g.op.Equal(size, g.const(0.0, dtype))
    size = g.op.Where(is_zero, g.const(1.0, dtype), size)
    return Complex(g.op.Div(x.real, size), g.op.Div(x.imag, size))


def part_dtype(node: FxNode) -> ir.DataType:
    """The element type of the parts of a node's complex result."""
    return PART_DTYPE[node.dtype]


def both(g: GraphBuilder, node: FxNode, *positions: int) -> list[Complex]:
    """Arguments as complex tensors in the result's precision."""
    return [as_complex(g, node.args[p], part_dtype(node)) for p in positions]


def nonzero(g: GraphBuilder, x: Complex) -> Value:
    """Whether a complex number differs from 0."""
    return g.op.Or(g.cast(x.real, BOOL), g.cast(x.imag, BOOL))
