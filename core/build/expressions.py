"""Sizes stated as expressions of other sizes (``2*s + 1``, ``(s + 1)//2``, ``Max(s, t)``), computed by ONNX nodes.

torch states every size of a captured program as a sympy expression. Integers are computed in int64 and floats in double, as
Python does. The functions are those of ``torch.utils._sympy.functions``, told apart by name.

Two examples, for a size ``s``::

    (s + 1)//2    Add(s, 1), Div(add, 2)
    (s - 9)//2    Sub(s, 9), Mod(sub, 2), Sub(sub, mod), Div(sub_1, 2)     Div alone would round -3/2 up to -1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import onnx_ir as ir

from onnxplug.build.opset import Emitter
from onnxplug.errors import Unsupported

_INT, _DOUBLE, _BOOL = ir.DataType.INT64, ir.DataType.DOUBLE, ir.DataType.BOOL
_LARGEST_UNROLLED_POWER = 64


class SizeComputer:
    """Emits the nodes that compute an expression.

    Args:
        g: The builder.
        symbol: The value of a free symbol; raises ``Unsupported`` where no value holds it.
    """

    def __init__(self, g: Emitter, symbol: Callable[[str], ir.Value]) -> None:
        self.g = g
        self.op = g.op
        self._symbol = symbol

    def size(self, expr: Any) -> ir.Value:
        """The 0-dim int64 value of an expression.

        Raises:
            Unsupported: A free symbol is held by no value of the graph, or a function has no translation.
        """
        return self.g.cast(self.value(expr), _INT)

    def value(self, expr: Any) -> ir.Value:
        """The 0-dim value of an expression: int64, double or bool."""
        if expr.is_Symbol:
            return self._symbol(str(expr))
        if expr.is_Integer:
            return self.g.const(int(expr), _INT)
        if expr.is_Float or expr.is_Rational:
            return self.g.const(float(expr), _DOUBLE)
        handler = _HANDLERS.get(type(expr).__name__)
        if handler is None:
            raise Unsupported(f"sizes that depend on {type(expr).__name__}, as in {expr}")
        return handler(self, expr)

    def values(self, expr: Any) -> list[ir.Value]:
        """The arguments of an expression, all int64 or all double."""
        operands = [self.value(a) for a in expr.args]
        dtype = _DOUBLE if any(v.dtype == _DOUBLE for v in operands) else _INT
        return [self.g.cast(v, dtype) for v in operands]

    def doubles(self, expr: Any) -> list[ir.Value]:
        """The arguments of an expression in double."""
        return [self.g.cast(self.value(a), _DOUBLE) for a in expr.args]

    def floor_quotient(self, a: Any, b: Any) -> ir.Value:
        """``a // b`` of integers, rounded down; ONNX's Div rounds towards zero."""
        x, y = self.value(a), self.value(b)
        if not (a.is_nonnegative and b.is_positive):
            # Mod has the sign of the divisor, so that the difference divides evenly.
            x = self.op.Sub(x, self.op.Mod(x, y))
        return self.op.Div(x, y)


Handler = Callable[[SizeComputer, Any], ir.Value]


def _folded(op_type: str) -> Handler:
    """An operator of two inputs over any number of arguments."""

    def compute(c: SizeComputer, expr: Any) -> ir.Value:
        return reduce(getattr(c.op, op_type), c.values(expr))

    return compute


def _mul(c: SizeComputer, expr: Any) -> ir.Value:
    numerator, denominator = expr.as_numer_denom()
    if expr.is_integer and denominator != 1:
        # torch writes a quotient that it knows to be whole as a product with a fraction.
        return c.op.Div(c.value(numerator), c.value(denominator))
    return _folded("Mul")(c, expr)


def _pow(c: SizeComputer, expr: Any) -> ir.Value:
    base, exponent = expr.args
    x = c.value(base)
    if x.dtype == _INT and exponent.is_Integer and 0 < int(exponent) <= _LARGEST_UNROLLED_POWER:
        # ONNX Runtime computes the Pow of integers in double, which is inexact beyond 2**53.
        result = x
        for _ in range(int(exponent) - 1):
            result = c.op.Mul(result, x)
        return result
    if expr.is_integer and exponent.is_nonnegative is not False and type(expr).__name__ == "PowByNatural":
        return c.op.Pow(x, c.value(exponent))
    a, b = c.doubles(expr)
    power = c.op.Pow(a, b)
    return power


def _floor_div(c: SizeComputer, expr: Any) -> ir.Value:
    return c.floor_quotient(*expr.args)


def _ceil_div(c: SizeComputer, expr: Any) -> ir.Value:
    a, b = expr.args
    return c.floor_quotient(a + b - 1, b) if b.is_positive else c.op.Neg(c.floor_quotient(-a, b))


def _clean_div(c: SizeComputer, expr: Any) -> ir.Value:
    a, b = c.values(expr)
    return c.op.Div(a, b)


def _modular_index(c: SizeComputer, expr: Any) -> ir.Value:
    x, divisor, modulus = expr.args
    return c.op.Mod(c.floor_quotient(x, divisor), c.value(modulus))


def _true_div(c: SizeComputer, expr: Any) -> ir.Value:
    a, b = c.doubles(expr)
    return c.op.Div(a, b)


def _shift(left: bool) -> Handler:
    def compute(c: SizeComputer, expr: Any) -> ir.Value:
        x, by = expr.args
        power = c.op.Pow(c.g.const(2, _INT), c.value(by))
        if left:
            return c.op.Mul(c.value(x), power)
        value = c.value(x)
        return c.op.Div(c.op.Sub(value, c.op.Mod(value, power)), power)

    return compute


def _where(c: SizeComputer, expr: Any) -> ir.Value:
    condition, *choices = expr.args
    branches = [c.value(a) for a in choices]
    dtype = _DOUBLE if any(v.dtype == _DOUBLE for v in branches) else branches[0].dtype or _INT
    yes, no = (c.g.cast(v, dtype) for v in branches)
    return c.op.Where(c.g.cast(c.value(condition), _BOOL), yes, no)


def _rounded(op_type: str | None, *, whole: bool) -> Handler:
    """A float rounded by an operator (or cut off), and an int afterwards where ``whole``."""

    def compute(c: SizeComputer, expr: Any) -> ir.Value:
        (x,) = expr.args
        value = c.value(x)
        if value.dtype == _INT:
            return value if whole else c.g.cast(value, _DOUBLE)
        if op_type is not None:
            value = getattr(c.op, op_type)(value)
            return c.g.cast(value, _INT) if whole else value
        cut = c.g.cast(value, _INT)
        return cut if whole else c.g.cast(cut, _DOUBLE)

    return compute


def _to_float(c: SizeComputer, expr: Any) -> ir.Value:
    return c.doubles(expr)[0]


def _unary(op_type: str) -> Handler:
    def compute(c: SizeComputer, expr: Any) -> ir.Value:
        return getattr(c.op, op_type)(c.doubles(expr)[0])

    return compute


def _identity(c: SizeComputer, expr: Any) -> ir.Value:
    return c.value(expr.args[0])


def _abs(c: SizeComputer, expr: Any) -> ir.Value:
    return c.op.Abs(c.value(expr.args[0]))


def _compare(op_type: str, *, negate: bool = False) -> Handler:
    def compute(c: SizeComputer, expr: Any) -> ir.Value:
        result: ir.Value = getattr(c.op, op_type)(*c.values(expr))
        return c.op.Not(result) if negate else result

    return compute


def _logic(op_type: str) -> Handler:
    def compute(c: SizeComputer, expr: Any) -> ir.Value:
        return reduce(getattr(c.op, op_type), [c.value(a) for a in expr.args])

    return compute


def _not(c: SizeComputer, expr: Any) -> ir.Value:
    return c.op.Not(c.value(expr.args[0]))


def _truth(value: bool) -> Handler:
    return lambda c, expr: c.g.const(value)


_HANDLERS: dict[str, Handler] = {
    "Abs": _abs,
    "Add": _folded("Add"),
    "And": _logic("And"),
    "BooleanFalse": _truth(False),
    "BooleanTrue": _truth(True),
    "CeilDiv": _ceil_div,
    "CeilToInt": _rounded("Ceil", whole=True),
    "CleanDiv": _clean_div,
    "Equality": _compare("Equal"),
    "FloatPow": _pow,
    "FloatTrueDiv": _true_div,
    "FloorDiv": _floor_div,
    "FloorToInt": _rounded("Floor", whole=True),
    "GreaterThan": _compare("GreaterOrEqual"),
    "Identity": _identity,
    "IntTrueDiv": _true_div,
    "LShift": _shift(True),
    "LessThan": _compare("LessOrEqual"),
    "Max": _folded("Max"),
    "Min": _folded("Min"),
    "Mod": _folded("Mod"),
    "ModularIndexing": _modular_index,
    "Mul": _mul,
    "Not": _not,
    "OpaqueUnaryFn_sqrt": _unary("Sqrt"),
    "OpaqueUnaryFn_exp": _unary("Exp"),
    "OpaqueUnaryFn_log": _unary("Log"),
    "Or": _logic("Or"),
    "Pow": _pow,
    "PowByNatural": _pow,
    "PythonMod": _folded("Mod"),
    "RShift": _shift(False),
    "RoundToInt": _rounded("Round", whole=True),
    "StrictGreaterThan": _compare("Greater"),
    "StrictLessThan": _compare("Less"),
    "ToFloat": _to_float,
    "TruncToFloat": _rounded(None, whole=False),
    "TruncToInt": _rounded(None, whole=True),
    "Unequality": _compare("Equal", negate=True),
    "Where": _where,
}
