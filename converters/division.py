"""Quotients and remainders."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute, truncated
from onnxplug.converters.helpers.exactness import WRONG_AND_SLOW
from onnxplug.converters.helpers.promotion import operands, operands_in, wide
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def div(g: GraphBuilder, node: FxNode) -> Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor

    True division: integers become floats first.
    """
    x, y = node.args[:2]
    return compute(g, "Div", node.dtype, x, y)


def div_mode(g: GraphBuilder, node: FxNode) -> Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    x, y, mode = node.args
    if mode is None:
        return compute(g, "Div", node.dtype, x, y)
    return _floor_quotient(g, x, y, node.dtype) if mode == "floor" else _truncated_quotient(g, x, y, node.dtype)


def floor_divide(g: GraphBuilder, node: FxNode) -> Value:
    """floor_divide(Tensor self, Tensor other) -> Tensor"""
    x, y = node.args
    return _floor_quotient(g, x, y, node.dtype)


def _truncated_quotient(g: GraphBuilder, x: Any, y: Any, dtype: ir.DataType) -> Value:
    """The quotient rounded towards zero, as ONNX's Div rounds integers."""
    if dtype.is_integer():
        return compute(g, "Div", dtype, x, y)
    # 16-bit floats are divided in float32: a quotient just below an integer would be rounded up to it.
    return g.cast(truncated(g, compute(g, "Div", wide(dtype), x, y)), dtype)


def _floor_quotient(g: GraphBuilder, x: Any, y: Any, dtype: ir.DataType) -> Value:
    """The quotient rounded down.

    Integers: the truncated quotient, less 1 where the remainder is not zero and the signs differ. Floats as torch
    defines it (c10::div_floor_floating): from the remainder, so that ``1 // 0.1`` is 9; infinities as in plain division.
    """
    if dtype.is_integer():
        inner = computed_in(g, "Div Mul Sub Equal Less", dtype)
        a, b = operands_in(g, x, y, dtype=dtype, inner=inner)
        quotient = g.op.Div(a, b)
        remainder = g.op.Sub(a, g.op.Mul(quotient, b))
        zero = g.const(0, inner)
        lower = g.op.And(
            g.op.Not(g.op.Equal(remainder, zero)), g.op.Xor(g.op.Less(remainder, zero), g.op.Less(b, zero))
        )
        return g.cast(g.op.Sub(quotient, g.cast(lower, inner)), dtype)
    if dtype != wide(dtype):
        return g.cast(_floor_quotient(g, x, y, wide(dtype)), dtype)
    a, b = operands(g, x, y, dtype=dtype)
    zero, one = g.const(0.0, dtype), g.const(1.0, dtype)
    remainder = g.op.Mod(a, b, fmod=1)
    exact = g.op.Div(g.op.Sub(a, remainder), b)
    wrong_side = g.op.And(
        g.op.Not(g.op.Equal(remainder, zero)), g.op.Xor(g.op.Less(b, zero), g.op.Less(remainder, zero))
    )
    exact = g.op.Where(wrong_side, g.op.Sub(exact, one), exact)
    rounded = g.op.Floor(exact)
    rounded = g.op.Where(g.op.Greater(g.op.Sub(exact, rounded), g.const(0.5, dtype)), g.op.Add(rounded, one), rounded)
    plain = g.op.Div(a, b)
    # A zero quotient keeps the sign of the exact quotient.
    rounded = g.op.Where(g.op.Equal(exact, zero), g.op.Mul(zero, plain), rounded)
    return g.op.Where(g.op.Equal(b, zero), plain, rounded)


def remainder(g: GraphBuilder, node: FxNode) -> Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor

    The result has the divisor's sign, as Python's ``%``.
    """
    x, y = node.args
    dtype = node.dtype
    if dtype.is_integer():
        return compute(g, "Mod", dtype, x, y)
    a, b = operands(g, x, y, dtype=dtype)
    zero = g.const(0.0, dtype)
    rest = g.op.Mod(a, b, fmod=1)
    other_side = g.op.And(g.op.Not(g.op.Equal(rest, zero)), g.op.Xor(g.op.Less(b, zero), g.op.Less(rest, zero)))
    return g.op.Where(other_side, g.op.Add(rest, b), rest)


def fmod(g: GraphBuilder, node: FxNode) -> Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor

    The result has the dividend's sign, as C's ``fmod``.
    """
    x, y = node.args
    dtype = node.dtype
    return g.op.Mod(*operands(g, x, y, dtype=dtype), fmod=1)


def fmod_of_integers(g: GraphBuilder, node: FxNode) -> Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor

    Computed from the quotient, which is exact.
    """
    x, y = node.args
    dtype = node.dtype
    a, b = operands_in(g, x, y, dtype=dtype, inner=computed_in(g, "Div Mul Sub", dtype))
    return g.cast(g.op.Sub(a, g.op.Mul(g.op.Div(a, b), b)), dtype)


def _of_integers(node: FxNode) -> bool:
    return bool(node.dtype.is_integer())


RULES: list[Rule] = [
    *overloads_of("div divide", "Tensor Scalar", div),
    *overloads_of("true_divide", "Tensor Scalar", div),
    *overloads_of("div divide", "Tensor_mode Scalar_mode", div_mode),
    *overloads_of("floor_divide", "default Scalar", floor_divide),
    *overloads_of("remainder", "Tensor Scalar Scalar_Tensor", remainder),
    *overloads_of("fmod", "Tensor Scalar", fmod),
    *overloads_of("fmod", "Tensor Scalar", fmod_of_integers, when=_of_integers, **WRONG_AND_SLOW),
]
