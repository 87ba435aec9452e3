"""Orthogonal polynomials whose degree is a tensor, by their three-term recurrences (A&S 22.7)."""

from __future__ import annotations

from collections.abc import Callable

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.real import INF, NAN, Real, iterate, largest, where
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

Step = Callable[[Real, Real, Real, Real], Real]
"""The polynomial of degree k + 1 from x, k and the polynomials of degrees k and k - 1."""
#: Degrees above which torch's Hermite polynomials are NaN, by dtype.
_HERMITE_LIMIT = {FLOAT: 128, DOUBLE: 512}
_FLOAT_MAX = 3.4028235677973366e38


def _recurrence(x: Real, n: Real, first: Real, step: Step) -> Real:
    """The polynomial of degree n for each element where n >= 1, in float64."""
    g = x.g

    def advance(number: Real, p: Real, q: Real) -> list[Real]:
        k = number + 1.0
        active = k < n
        return [where(active, q, p), where(active, step(x, k, q, p), q)]

    # Both of the shape that x and n broadcast to.
    start = Real(g, g.op.Expand(first.value, g.shape(n.value)))
    one = Real(g, g.op.Expand(g.const(1.0, DOUBLE), g.shape(start.value)))
    return iterate(largest((n - 1.0).to(INT64)), advance, one, start, name="degrees")[1]


def _family(name: str, first: Callable[[Real], Real], step: Step) -> Converter:
    """A converter for one family: its polynomial of degree 1 and its recurrence; of degree 0 it is 1, below 0.

    The degree is rounded towards zero; NaN and infinite degrees count as negative, as in torch's cast to integers.
    All in float64: torch's Chebyshev polynomials are cosines between -1 and 1, more exact than a recurrence in float32;
    the others are recurrences in torch too, whose rounding differs from one processor to the next.
    """
    hermite = "hermite" in name

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = node.dtype
        x, n = (Real(g, operand(g, a, dtype), dtype) for a in node.args)
        if name.startswith("shifted"):
            # 2x - 1, rounded as torch does.
            x = x + x - 1.0
        x = x.to(DOUBLE)
        n = where(abs(n) < 2.0**63, n, -1.0).to(INT64).to(DOUBLE)
        too_high = n > float(_HERMITE_LIMIT.get(dtype, 1024))
        degree = where(too_high, -1.0, n) if hermite else n
        value = _recurrence(x, degree, first(x), step if dtype == DOUBLE else _narrow(step))
        value = where(n >= 1.0, value, where(n.equals(0.0), x.const(1.0), 0.0))
        return g.cast((where(too_high, NAN, value) if hermite else value).value, dtype)

    convert.__name__ = convert.__qualname__ = name
    return convert


def _narrow(step: Step) -> Step:
    """A step in float64 that overflows where float32 does: the next steps give NaN for an infinity, as in torch."""

    def narrowed(x: Real, k: Real, q: Real, p: Real) -> Real:
        new = step(x, k, q, p)
        return where(abs(new) > _FLOAT_MAX, new * INF, new)

    return narrowed


def _chebyshev(x: Real, k: Real, q: Real, p: Real) -> Real:
    return (x + x) * q - p


def _hermite_h(x: Real, k: Real, q: Real, p: Real) -> Real:
    return (x + x) * q - (k + k) * p


def _hermite_he(x: Real, k: Real, q: Real, p: Real) -> Real:
    return x * q - k * p


def _laguerre(x: Real, k: Real, q: Real, p: Real) -> Real:
    return ((k + k + (1.0 - x)) * q - k * p) / (k + 1.0)


def _legendre(x: Real, k: Real, q: Real, p: Real) -> Real:
    return ((k + k + 1.0) * x * q - k * p) / (k + 1.0)


_FIRST: dict[str, Callable[[Real], Real]] = {
    "t": lambda x: x,
    "u": lambda x: x + x,
    "v": lambda x: x + x - 1.0,
    "w": lambda x: x + x + 1.0,
}
_FAMILIES = [
    *[_family(f"chebyshev_polynomial_{kind}", first, _chebyshev) for kind, first in _FIRST.items()],
    *[_family(f"shifted_chebyshev_polynomial_{kind}", first, _chebyshev) for kind, first in _FIRST.items()],
    _family("hermite_polynomial_h", lambda x: x + x, _hermite_h),
    _family("hermite_polynomial_he", lambda x: x, _hermite_he),
    _family("laguerre_polynomial_l", lambda x: 1.0 - x, _laguerre),
    _family("legendre_polynomial_p", lambda x: x, _legendre),
]
RULES: list[Rule] = [
    Rule(f"aten::special_{family.__name__}.{overload}", family)
    for family in _FAMILIES
    for overload in ("default", "x_scalar", "n_scalar")
]
