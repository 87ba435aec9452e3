"""Formulas of real numbers: values on which Python's operators emit ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Union

import onnx_ir as ir
from numpy.polynomial import chebyshev as _chebyshev
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.promotion import operand
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter

DOUBLE = DOUBLE
Number = Union["Real", float]
INF, NAN, PI = math.inf, math.nan, math.pi


class Real:
    """A value in a formula; numbers combined with it become constants of its dtype.

    Comparisons give boolean values, which ``&``, ``|``, ``~`` and :func:`where` take.
    """

    __slots__ = ("dtype", "g", "value")

    def __init__(self, g: GraphBuilder, value: Value, dtype: ir.DataType = DOUBLE) -> None:
        self.g = g
        self.value = value
        self.dtype = dtype

    def lift(self, other: Number) -> Value:
        """The other operand as a Value."""
        return other.value if isinstance(other, Real) else self.g.const(float(other), self.dtype)

    def apply(self, op_type: str, *others: Number, dtype: ir.DataType | None = None) -> Real:
        """A node on this value and others."""
        value = getattr(self.g.op, op_type)(self.value, *[self.lift(o) for o in others])
        return Real(self.g, value, dtype or self.dtype)

    def const(self, number: float) -> Real:
        """A number of the same dtype."""
        return Real(self.g, self.lift(number), self.dtype)

    def _compare(self, op_type: str, other: Number) -> Real:
        return self.apply(op_type, other, dtype=BOOL)

    def __add__(self, other: Number) -> Real:
        return self.apply("Add", other)

    def __radd__(self, other: float) -> Real:
        return self.const(other) + self

    def __sub__(self, other: Number) -> Real:
        return self.apply("Sub", other)

    def __rsub__(self, other: float) -> Real:
        return self.const(other) - self

    def __mul__(self, other: Number) -> Real:
        return self.apply("Mul", other)

    def __rmul__(self, other: float) -> Real:
        return self.const(other) * self

    def __truediv__(self, other: Number) -> Real:
        return self.apply("Div", other)

    def __rtruediv__(self, other: float) -> Real:
        return self.const(other) / self

    def __pow__(self, other: Number) -> Real:
        return self.apply("Pow", other)

    def __rpow__(self, other: float) -> Real:
        return self.const(other) ** self

    def __neg__(self) -> Real:
        return self.apply("Neg")

    def __abs__(self) -> Real:
        return self.apply("Abs")

    def __lt__(self, other: Number) -> Real:
        return self._compare("Less", other)

    def __le__(self, other: Number) -> Real:
        return self._compare("LessOrEqual", other)

    def __gt__(self, other: Number) -> Real:
        return self._compare("Greater", other)

    def __ge__(self, other: Number) -> Real:
        return self._compare("GreaterOrEqual", other)

    def equals(self, other: Number) -> Real:
        """Elementwise equality."""
        return self._compare("Equal", other)

    def __and__(self, other: Real) -> Real:
        return self.apply("And", other)

    def __or__(self, other: Real) -> Real:
        return self.apply("Or", other)

    def __invert__(self) -> Real:
        return self.apply("Not")

    def is_nan(self) -> Real:
        """Whether it is NaN, elementwise."""
        return self.apply("IsNaN", dtype=BOOL)

    def is_inf(self) -> Real:
        """Whether it is infinite, of either sign, elementwise."""
        return self.apply("IsInf", dtype=BOOL)

    def to(self, dtype: ir.DataType) -> Real:
        """The value in another dtype."""
        return Real(self.g, self.g.cast(self.value, dtype), dtype)

    def rounded(self, dtype: ir.DataType) -> Real:
        """The value rounded to a narrower dtype, as torch rounds each step of a composed operator."""
        return self.to(dtype).to(self.dtype)

    def exp(self) -> Real:
        """e to its power."""
        return self.apply("Exp")

    def log(self) -> Real:
        """The natural logarithm."""
        return self.apply("Log")

    def log1p(self) -> Real:
        """log(1 + x), without loss at small x (Higham, Accuracy and Stability, 1.14.1)."""
        u = self + 1.0
        return where(u.equals(1.0) | u.equals(INF), self, u.log() * (self / (u - 1.0)))

    def sqrt(self) -> Real:
        """The square root."""
        return self.apply("Sqrt")

    def sin(self) -> Real:
        """The sine."""
        return self.apply("Sin")

    def cos(self) -> Real:
        """The cosine."""
        return self.apply("Cos")

    def floor(self) -> Real:
        """Rounded down."""
        return self.apply("Floor")

    def round(self) -> Real:
        """Rounded to the nearest whole number, ties to even."""
        return self.apply("Round")


def where(condition: Real, yes: Number, no: Number) -> Real:
    """One value where the condition holds, the other elsewhere; at least one of them is a value of the graph."""
    like = yes if isinstance(yes, Real) else no
    assert isinstance(like, Real)
    value = like.g.op.Where(condition.value, like.lift(yes), like.lift(no))
    return Real(like.g, value, like.dtype)


def polynomial(x: Real, coefficients: Sequence[float]) -> Real:
    """A polynomial by Horner's rule, highest power first."""
    result = x.const(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def ratio(x: Real, numerator: Sequence[float], denominator: Sequence[float]) -> Real:
    """A rational function, both polynomials highest power first."""
    return polynomial(x, numerator) / polynomial(x, denominator)


def chebyshev(x: Real, coefficients: Sequence[float]) -> Real:
    """A Chebyshev series on [-1, 1], highest order first, its constant term to be halved, as Cephes has them.

    Summed as a polynomial, with two nodes for each term where Clenshaw's recurrence has three. Terms below the rounding
    of doubles are left out.
    """
    series = [c for c in coefficients if abs(c) > 1e-17]
    powers = _chebyshev.cheb2poly([series[-1] / 2, *series[-2::-1]])
    return polynomial(x, [float(c) for c in powers[::-1]])


def iterate(count: Value, body: Callable[..., Sequence[Real]], *state: Real, name: str = "steps") -> tuple[Real, ...]:
    """A Loop of ``count`` steps; ``body`` takes the step's number (as float64) and the state, and gives the new state.

    The state's shapes must not change: operands of different shapes are broadcast before the loop.
    """
    g = state[0].g

    def build(step: Value, going: Value, *formals: Value) -> list[Value]:
        reals = [Real(g, f, s.dtype) for f, s in zip(formals, state, strict=True)]
        return [going, *[r.value for r in body(Real(g, g.cast(step, DOUBLE)), *reals)]]

    dims = [s.value.shape.dims if s.value.shape is not None else None for s in state]
    inputs: list[tuple[Any, Any]] = [(INT64, ()), (BOOL, ())]
    inputs += [(s.dtype, d) for s, d in zip(state, dims, strict=True)]
    graph = g.subgraph(build, inputs, name)
    results = g.op.Loop(count, None, *[s.value for s in state], body=graph, _outputs=len(state))
    values = results if isinstance(results, tuple) else (results,)
    return tuple(Real(g, v, s.dtype) for v, s in zip(values, state, strict=True))


def largest(x: Real) -> Value:
    """The largest element of an int64 value and zero, as a scalar; zero for an empty value."""
    g = x.g
    flat = g.op.Concat(g.op.Reshape(x.value, [-1]), [0], axis=0)
    return g.op.ReduceMax(flat, keepdims=0)


def _named(convert: Converter, formula: Callable[..., Real]) -> Converter:
    convert.__name__ = convert.__qualname__ = formula.__name__
    convert.__module__ = formula.__module__
    convert.__doc__ = formula.__doc__
    return convert


def in_double(formula: Callable[..., Real]) -> Converter:
    """A converter that computes a formula of all the operator's arguments in float64, whatever the dtype of its result.

    These functions lose many digits in some ranges, and ONNX Runtime has float64 kernels for the operators used, so
    that one form serves every dtype.
    """

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        args = [Real(g, operand(g, x, DOUBLE)) for x in node.args]
        return g.cast(formula(*args).value, node.dtype)

    return _named(convert, formula)


def in_float(formula: Callable[..., Real]) -> Converter:
    """As :func:`in_double`, in float32 where the result isn't float64: for formulas that lose no digits."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = DOUBLE if node.dtype == DOUBLE else FLOAT
        args = [Real(g, operand(g, x, dtype), dtype) for x in node.args]
        return g.cast(formula(*args).value, node.dtype)

    return _named(convert, formula)
