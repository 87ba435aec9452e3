"""Arithmetic: elementwise operators with torch's type promotion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute, truncated
from onnxplug.converters.helpers.promotion import operand, operands, through
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_BOOL = ir.DataType.BOOL
#: Integers whose arithmetic ONNX Runtime has kernels for; the others are computed in int32, which wraps back exactly.
_WIDE = frozenset({ir.DataType.INT32, ir.DataType.INT64})


def _scaled(g: GraphBuilder, x: Any, alpha: Any, dtype: ir.DataType) -> Any:
    """``x * alpha``; ``x`` itself when alpha is one."""
    if not isinstance(alpha, Value) and alpha == 1:
        return x
    return compute(g, "Mul", dtype, x, alpha)


def add(g: GraphBuilder, node: FxNode) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    x, y, alpha = node.args
    dtype = node.dtype
    if dtype == _BOOL:
        result: Value = g.op.Or(*operands(g, x, y, dtype=_BOOL))
        return result
    return compute(g, "Add", dtype, x, _scaled(g, y, alpha, dtype))


def sub(g: GraphBuilder, node: FxNode) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    x, y, alpha = node.args
    return compute(g, "Sub", node.dtype, x, _scaled(g, y, alpha, node.dtype))


def rsub(g: GraphBuilder, node: FxNode) -> Value:
    """rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    x, y, alpha = node.args
    return compute(g, "Sub", node.dtype, y, _scaled(g, x, alpha, node.dtype))


def mul(g: GraphBuilder, node: FxNode) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    x, y = node.args[:2]
    if node.dtype == _BOOL:
        result: Value = g.op.And(*operands(g, x, y, dtype=_BOOL))
        return result
    return compute(g, "Mul", node.dtype, x, y)


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
    """The quotient rounded towards zero; ONNX divides integers so."""
    if dtype.is_integer():
        return compute(g, "Div", dtype, x, y)
    # Halves in float, lest a quotient just below an integer is rounded up to it first.
    return g.cast(truncated(g, compute(g, "Div", _step(dtype), x, y)), dtype)


def _floor_quotient(g: GraphBuilder, x: Any, y: Any, dtype: ir.DataType) -> Value:
    """The quotient rounded down.

    Integers: the truncated quotient, less one where the remainder is not zero and the signs differ. Floats as torch
    defines it (c10::div_floor_floating): from the remainder, so that ``1 // 0.1`` is 9; infinities as in plain division.
    """
    if dtype.is_integer():
        inner = dtype if dtype in _WIDE else ir.DataType.INT64
        a, b = through(g, x, y, dtype=dtype, inner=inner)
        quotient = g.op.Div(a, b)
        remainder = g.op.Sub(a, g.op.Mul(quotient, b))
        zero = g.const(0, inner)
        lower = g.op.And(
            g.op.Not(g.op.Equal(remainder, zero)), g.op.Xor(g.op.Less(remainder, zero), g.op.Less(b, zero))
        )
        return g.cast(g.op.Sub(quotient, g.cast(lower, inner)), dtype)
    if dtype != _step(dtype):
        return g.cast(_floor_quotient(g, x, y, _step(dtype)), dtype)
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
    # A zero quotient keeps the sign of the true one.
    rounded = g.op.Where(g.op.Equal(exact, zero), g.op.Mul(zero, plain), rounded)
    result: Value = g.op.Where(g.op.Equal(b, zero), plain, rounded)
    return result


def remainder(g: GraphBuilder, node: FxNode) -> Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor

    The result has the divisor's sign, as Python's ``%``.
    """
    x, y = node.args
    dtype = node.dtype
    if dtype.is_integer():
        inner = dtype if dtype in _WIDE else ir.DataType.INT64
        return g.cast(g.op.Mod(*through(g, x, y, dtype=dtype, inner=inner)), dtype)
    a, b = operands(g, x, y, dtype=dtype)
    zero = g.const(0.0, dtype)
    rest = g.op.Mod(a, b, fmod=1)
    other_side = g.op.And(g.op.Not(g.op.Equal(rest, zero)), g.op.Xor(g.op.Less(b, zero), g.op.Less(rest, zero)))
    result: Value = g.op.Where(other_side, g.op.Add(rest, b), rest)
    return result


def fmod(g: GraphBuilder, node: FxNode) -> Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor

    The result has the dividend's sign, as C's ``fmod``.
    """
    x, y = node.args
    dtype = node.dtype
    if dtype.is_integer():
        # ONNX Runtime's fmod of integers goes through double; its division of integers is exact.
        a, b = through(g, x, y, dtype=dtype, inner=dtype if dtype in _WIDE else ir.DataType.INT64)
        return g.cast(g.op.Sub(a, g.op.Mul(g.op.Div(a, b), b)), dtype)
    return g.cast(g.op.Mod(*operands(g, x, y, dtype=dtype), fmod=1), dtype)


def pow_(g: GraphBuilder, node: FxNode) -> Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    x, exponent = node.args
    dtype = node.dtype
    if not isinstance(exponent, Value):
        if exponent == 2:
            return compute(g, "Mul", dtype, x, x)
        if exponent == 0.5 and dtype.is_floating_point():
            # As torch, whose (-inf) ** 0.5 is NaN where C's pow has inf.
            result: Value = g.op.Sqrt(operand(g, x, dtype))
            return result
        if dtype.is_integer() and exponent < 0:
            raise Unsupported("integers to a negative power: torch itself refuses it")
    if dtype.is_integer():
        return integer_power(g, x, exponent, dtype)
    if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        wide = ir.DataType.FLOAT
        return g.cast(g.op.Pow(*operands(g, x, exponent, dtype=wide)), dtype)
    return compute(g, "Pow", dtype, x, exponent)


def integer_power(g: GraphBuilder, x: Any, exponent: Any, dtype: ir.DataType) -> Value:
    """An integer power, exact and wrapping as torch's: by squaring when the exponent is a small constant.

    ONNX Runtime computes integer Pow through double, which is wrong above 2**53.
    """
    inner = dtype if dtype in _WIDE else ir.DataType.INT64
    if isinstance(exponent, int) and 0 <= exponent <= 64:
        base = operand(g, x, inner)
        if exponent == 0:
            zero: Value = g.op.Mul(base, g.const(0, inner))
            return g.cast(g.op.Add(zero, g.const(1, inner)), dtype)
        result: Value | None = None
        while exponent:
            if exponent & 1:
                result = base if result is None else g.op.Mul(result, base)
            exponent >>= 1
            if exponent:
                base = g.op.Mul(base, base)
        assert result is not None
        return g.cast(result, dtype)
    return g.cast(_squaring(g, *operands(g, x, exponent, dtype=ir.DataType.INT64)), dtype)


def _squaring(g: GraphBuilder, base: Value, exponent: Value) -> Value:
    """By repeated squaring of all elements at once, until every exponent is used up.

    To a negative power 1 is 1, -1 is ±1 and everything else 0, as torch has it.
    """
    int64, zero, one, two = ir.DataType.INT64, g.const(0), g.const(1), g.const(2)
    shape = g.op.Shape(g.op.Add(base, exponent))
    base, exponent = (g.op.Expand(v, shape) for v in (base, exponent))
    dims: Any = list(base.shape) if base.shape is not None else None

    def body(number: Value, going: Value, result: Value, power: Value, rest: Value) -> list[Value]:
        odd = g.op.Equal(g.op.Mod(rest, two), one)
        result = g.op.Where(odd, g.op.Mul(result, power), result)
        half = g.op.Div(rest, two)
        left = g.op.Greater(g.op.ReduceMax(half, keepdims=0), zero)
        return [left, result, g.op.Mul(power, power), half]

    inputs = [(int64, ()), (_BOOL, ()), *[(int64, dims)] * 3]
    graph = g.subgraph(body, inputs, name="square")
    start = g.op.Expand(one, shape)
    power, _, _ = g.op.Loop(None, g.const(True), start, base, g.op.Abs(exponent), body=graph, _outputs=3)
    unit = g.op.Equal(g.op.Abs(base), one)
    negative = g.op.Less(exponent, zero)
    result: Value = g.op.Where(g.op.And(negative, g.op.Not(unit)), zero, power)
    return result


def unary(op_type: str) -> Converter:
    """A converter for an operator that ONNX has under one name; integers become floats where torch's result is one."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = node.dtype
        half = dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
        x = operand(g, node.args[0], ir.DataType.FLOAT if half and op_type in _FLOAT_ONLY else dtype)
        return g.cast(getattr(g.op, op_type)(x), dtype)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


#: ONNX Runtime has these for float (and double) alone, or loses precision in half.
_FLOAT_ONLY = frozenset(
    ["Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan", "Sin", "Cos", "Log", "Exp"]
)


def rounding(op_type: str) -> Converter:
    """Floor, Ceil: integers stay as they are."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = node.args[0]
        return x if node.dtype.is_integer() else getattr(g.op, op_type)(x)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def round_decimals(g: GraphBuilder, node: FxNode) -> Value:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    x, decimals = node.args
    if node.dtype.is_integer():
        raise Unsupported("rounding integers to decimals")
    scale = g.const(10.0 ** abs(decimals), node.dtype)
    if decimals >= 0:
        result: Value = g.op.Div(g.op.Round(g.op.Mul(x, scale)), scale)
    else:
        result = g.op.Mul(g.op.Round(g.op.Div(x, scale)), scale)
    return result


def trunc(g: GraphBuilder, node: FxNode) -> Value:
    """trunc(Tensor self) -> Tensor"""
    x = node.args[0]
    return x if node.dtype.is_integer() else truncated(g, x)


def frac(g: GraphBuilder, node: FxNode) -> Value:
    """frac(Tensor self) -> Tensor"""
    x = node.args[0]
    result: Value = g.op.Sub(x, truncated(g, x))
    return result


def neg(g: GraphBuilder, node: FxNode) -> Value:
    """neg(Tensor self) -> Tensor"""
    x = node.args[0]
    if node.dtype in (ir.DataType.UINT8, ir.DataType.INT16):
        return compute(g, "Sub", node.dtype, 0, x)
    result: Value = g.op.Neg(x)
    return result


def abs_(g: GraphBuilder, node: FxNode) -> Value:
    """abs(Tensor self) -> Tensor"""
    result: Value = g.op.Abs(node.args[0])
    return result


def sign(g: GraphBuilder, node: FxNode) -> Value:
    """sign(Tensor self) -> Tensor"""
    x = node.args[0]
    if node.dtype == _BOOL:
        return x
    if not node.dtype.is_floating_point():
        result: Value = g.op.Sign(x)
        return result
    # torch's sign of NaN is 0.
    result = g.op.Where(g.op.IsNaN(x), g.const(0.0, node.dtype), g.op.Sign(x))
    return result


def rsqrt(g: GraphBuilder, node: FxNode) -> Value:
    """rsqrt(Tensor self) -> Tensor"""
    result: Value = g.op.Reciprocal(g.op.Sqrt(operand(g, node.args[0], node.dtype)))
    return result


def square(g: GraphBuilder, node: FxNode) -> Value:
    """square(Tensor self) -> Tensor"""
    x = node.args[0]
    return compute(g, "Mul", node.dtype, x, x)


def angle(g: GraphBuilder, node: FxNode) -> Value:
    """angle(Tensor self) -> Tensor

    Of a real number: pi below zero, else 0; NaN of NaN.
    """
    x = operand(g, node.args[0], node.dtype)
    zero = g.const(0.0, node.dtype)
    turned: Value = g.op.Where(g.op.Less(x, zero), g.const(math.pi, node.dtype), zero)
    return g.op.Where(g.op.IsNaN(x), x, turned) if node.args[0].dtype.is_floating_point() else turned


def addcmul(g: GraphBuilder, node: FxNode) -> Value:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    x, a, b, value = node.args
    dtype = _step(node.dtype)
    return g.cast(compute(g, "Add", dtype, x, _scaled(g, compute(g, "Mul", dtype, a, b), value, dtype)), node.dtype)


def addcdiv(g: GraphBuilder, node: FxNode) -> Value:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    x, a, b, value = node.args
    dtype = _step(node.dtype)
    return g.cast(compute(g, "Add", dtype, x, compute(g, "Div", dtype, _scaled(g, a, value, dtype), b)), node.dtype)


def _step(dtype: ir.DataType) -> ir.DataType:
    """The dtype between the steps of one operator: torch rounds halves once, at the end."""
    return ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype


def lerp(g: GraphBuilder, node: FxNode) -> Value:
    """lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor

    Above a weight of one half torch computes from the end.
    """
    inner = _step(node.dtype)
    start, end, weight = operands(g, *node.args, dtype=inner)
    span = g.op.Sub(end, start)
    from_start = g.op.Add(start, g.op.Mul(weight, span))
    from_end = g.op.Sub(end, g.op.Mul(span, g.op.Sub(g.const(1.0, inner), weight)))
    result = g.op.Where(g.op.Less(g.op.Abs(weight), g.const(0.5, inner)), from_start, from_end)
    return g.cast(result, node.dtype)


def extremum(op_type: str) -> Converter:
    """maximum, minimum: NaN wins, as in ONNX."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args[:2]
        if node.dtype == _BOOL:
            result: Value = getattr(g.op, "Or" if op_type == "Max" else "And")(*operands(g, x, y, dtype=_BOOL))
            return result
        return compute(g, op_type, node.dtype, x, y)

    convert.__name__ = convert.__qualname__ = "maximum" if op_type == "Max" else "minimum"
    return convert


def ignoring_nan(op_type: str) -> Converter:
    """fmax, fmin: NaN loses against a number."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args
        dtype = node.dtype
        if not dtype.is_floating_point():
            return extremum(op_type)(g, node)
        inner = ir.DataType.FLOAT if dtype.bitwidth == 16 else dtype
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
    if plain and (dtype.is_floating_point() or dtype in _WIDE):
        if dtype.is_integer():
            least, most = (-(1 << (dtype.bitwidth - 1)), (1 << (dtype.bitwidth - 1)) - 1)
            low, high = (None if b is None else int(min(max(b, least), most)) for b in (low, high))
        low, high = (None if b is None else g.const(b, dtype) for b in (low, high))
        x = g.cast(x, dtype)
        if low is not None and high is not None:
            result: Value = g.op.Clip(x, low, high)
            return result
        if dtype.is_integer():
            result = g.op.Clip(x, low, high)
            return result
        # For a bound that is absent ONNX Runtime's Clip takes the largest finite number, which infinity exceeds.
        return compute(g, "Max", dtype, x, low) if low is not None else compute(g, "Min", dtype, x, high)
    clamped = operand(g, x, dtype)
    if low is not None:
        clamped = compute(g, "Max", dtype, clamped, low)
    return clamped if high is None else compute(g, "Min", dtype, clamped, high)


def _table(names: str, overloads: str, convert: Callable[..., Any]) -> list[Rule]:
    return [Rule(f"aten::{name}.{overload}", convert) for name in names.split() for overload in overloads.split()]


_UNARY = {
    "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos",
    "tanh": "Tanh", "sigmoid": "Sigmoid",
}  # fmt: skip
RULES: list[Rule] = [
    *_table("add", "Tensor Scalar", add),
    *_table("sub subtract", "Tensor Scalar", sub),
    *_table("rsub", "Tensor Scalar", rsub),
    *_table("mul multiply", "Tensor Scalar", mul),
    *_table("div divide", "Tensor Scalar", div),
    *_table("true_divide", "Tensor Scalar", div),
    *_table("div divide", "Tensor_mode Scalar_mode", div_mode),
    *_table("floor_divide", "default Scalar", floor_divide),
    *_table("remainder", "Tensor Scalar Scalar_Tensor", remainder),
    *_table("fmod", "Tensor Scalar", fmod),
    *_table("pow", "Tensor_Scalar Tensor_Tensor Scalar", pow_),
    *[Rule(f"aten::{name}.default", unary(op_type)) for name, op_type in _UNARY.items()],
    *[Rule(f"aten::{name}.default", rounding(name.capitalize())) for name in ("floor", "ceil", "round")],
    Rule("aten::round.decimals", round_decimals),
    *_table("trunc fix", "default", trunc),
    Rule("aten::frac.default", frac),
    *_table("neg negative", "default", neg),
    *_table("abs absolute", "default", abs_),
    *_table("sign sgn", "default", sign),
    Rule("aten::rsqrt.default", rsqrt),
    Rule("aten::square.default", square),
    Rule("aten::angle.default", angle),
    Rule("aten::addcmul.default", addcmul),
    Rule("aten::addcdiv.default", addcdiv),
    *_table("lerp", "Scalar Tensor", lerp),
    *_table("maximum", "default", extremum("Max")),
    *_table("minimum", "default", extremum("Min")),
    *_table("max", "other", extremum("Max")),
    *_table("min", "other", extremum("Min")),
    Rule("aten::fmax.default", ignoring_nan("Max")),
    Rule("aten::fmin.default", ignoring_nan("Min")),
    *_table("clamp clip", "default Tensor", clamp),
    *_table("clamp_min", "default Tensor", clamp_min),
    *_table("clamp_max", "default Tensor", clamp_max),
]
