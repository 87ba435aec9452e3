"""The gamma function and its relatives: lgamma, digamma, polygamma, Hurwitz zeta, the incomplete gamma functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import to_torch_dtype
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.error_function import erfc
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.real import INF, NAN, PI, Real, in_double, iterate, largest, polynomial, where
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

#: B2, B4, … B16.
_BERNOULLI = [
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510,
]  # fmt: skip
_STEPS_FROM_ZERO = 10


def _rising_factors(x: Real) -> list[Real]:
    """Four numbers whose product is x (x + 1) … (x + 7): t, t + 6, t + 10, t + 12 with t = x (x + 7)."""
    t = x * (x + 7.0)
    return [t, t + 6.0, t + 10.0, t + 12.0]


def _asymptotic(x: Real, coefficients: Sequence[float]) -> Real:
    """The sum of ``coefficients[k] / x^(2k)``, lowest first."""
    inverse = 1.0 / x
    return polynomial(inverse * inverse, coefficients[::-1])


def _fraction(x: Real) -> Real:
    """x minus the nearest whole number, the argument of functions of period 1."""
    return x - x.round()


def _log_gamma(x: Real) -> Real:
    """log Γ(x) for x >= 0: Stirling's series at x >= 8, below from log Γ(x + 8) (A&S 6.1.40, 6.1.15)."""
    small = x < 8.0
    y = where(small, x + 8.0, x)
    series = _asymptotic(y, [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]) / y
    # (y - 1/2) (log y - 1) - 1/2, for (y - 1/2) log y - y would be inf - inf.
    large = (y - 0.5) * (y.log() - 1.0) + (math.log(2 * PI) / 2 - 0.5) + series
    a, b, c, d = _rising_factors(x)
    return where(small, large - (a * b * c * d).log(), large)


def lgamma(x: Real) -> Real:
    """lgamma(Tensor self) -> Tensor

    log |Γ(x)|; below zero log(π / |sin πx|) - log Γ(1 - x) (A&S 6.1.17), +inf at the poles and at -inf.
    """
    negative = x < 0.0
    value = _log_gamma(where(negative, 1.0 - x, x))
    reflected = (PI / abs((_fraction(x) * PI).sin())).log() - value
    return where(x.is_inf(), INF, where(negative, reflected, value))


def mvlgamma(g: GraphBuilder, node: FxNode) -> Value:
    """mvlgamma(Tensor self, int p) -> Tensor

    log Γ(x) + log Γ(x - 1/2) + … of p terms, and p (p - 1) / 4 log π. The terms' arguments are rounded as torch does: at
    x = 1 + 1e-9 one of them is a pole in float32.
    """
    x, p = node.args
    narrow = DOUBLE if node.dtype == DOUBLE else FLOAT
    value = Real(g, unsqueeze(g, operand(g, x, narrow), -1), narrow)
    shifted = (value - Real(g, g.cast(g.const(np.arange(p) / 2.0), narrow))).to(DOUBLE)
    total = Real(g, reduce(g, "ReduceSum", lgamma(shifted).value, [rank_of(x)], keepdims=False))
    return g.cast((total + p * (p - 1) / 4 * math.log(PI)).value, node.dtype)


def digamma(x: Real) -> Real:
    """digamma(Tensor self) -> Tensor

    The derivatives of lgamma's formulas (A&S 6.3.18, 6.3.6, 6.3.7). The result is NaN at negative whole numbers, and an
    infinity of the opposite sign at ±0.
    """
    negative = x < 0.0
    y = where(negative, 1.0 - x, x)
    small = y < 8.0
    z = where(small, y + 8.0, y)
    inverse = 1.0 / z
    series = _asymptotic(z, [b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)]) * (inverse * inverse)
    large = z.log() - 0.5 * inverse - series
    a, b, c, d = [1.0 / factor for factor in _rising_factors(y)]
    value = where(small, large - (2.0 * y + 7.0) * (a + b + c + d), large)
    angle = _fraction(x) * PI
    reflected = where(angle.equals(0.0), NAN, value - PI * angle.cos() / angle.sin())
    return where(negative, reflected, value)


def _trigamma(x: Real, sine: Real) -> Real:
    """ψ'(x); below 1/2 (π / sin πx)² - ψ'(1 - x) (A&S 6.4.7)."""
    reflect = x < 0.5
    value = zeta(x.const(2.0), where(reflect, 1.0 - x, x))
    # It is zero at infinity, where zeta is NaN.
    value = where(x.is_inf(), 0.0, value)
    return where(reflect, PI * PI / (sine * sine) - value, value)


def polygamma(g: GraphBuilder, node: FxNode) -> Value:
    """polygamma(int n, Tensor self) -> Tensor

    (-1)^(n+1) n! ζ(n + 1, x) (A&S 6.4.10), the factorial as torch rounds it. The first derivative is reflected instead,
    with the sine of the rounded πx: at a pole PyTorch's result is the float32 value of that, not infinity.
    """
    n, x = node.args
    value = Real(g, operand(g, x, DOUBLE))
    if n == 0:
        return g.cast(digamma(value).value, node.dtype)
    narrow = DOUBLE if node.dtype == DOUBLE else FLOAT
    if n == 1:
        sine = (Real(g, operand(g, x, narrow), narrow) * PI).sin()
        return g.cast(_trigamma(value, sine.to(DOUBLE)).value, node.dtype)
    factorial = torch.tensor(n + 1.0, dtype=to_torch_dtype(narrow)).lgamma().exp().item()
    factor = factorial if n % 2 else -factorial
    return g.cast((factor * zeta(value.const(n + 1.0), value)).value, node.dtype)


def zeta(s: Real, q: Real) -> Real:
    """special_zeta(Tensor self, Tensor other) -> Tensor

    Σ (q + k)^-s: the first terms one by one until q + k is beyond 9 for every element, the others by Euler's and
    Maclaurin's formula (Edwards, Riemann's Zeta Function, 6.4).
    """
    whole = q.equals(q.floor())
    count = where((q < 0.0) & ~whole, -q.floor(), 0.0).to(INT64)
    steps = q.g.op.Add(largest(count), _STEPS_FROM_ZERO - 1)
    start = Real(q.g, q.g.op.Expand(q.value, q.g.shape(s.value)))
    w, total = iterate(
        steps, lambda k, a, total: [a + 1.0, total + (a + 1.0) ** -s], start, start**-s, name="zeta_terms"
    )
    term = w**-s
    # The same products as in torch, so that NaN appears for the same arguments.
    tail = polynomial_of_steps(s, 1.0 / (w * w)) * (s / w) + (w / (s - 1.0) - 0.5)
    # A term below the rounding of the sum ends it: for large s the formula would multiply 0 by infinity.
    value = where(abs(term) < abs(total) * 2.0**-53, total, total + term * tail)
    pole = (q <= 0.0) & whole
    undefined = (s < 1.0) | ((q < 0.0) & ~whole & ~s.equals(s.floor()))
    return where(s.equals(1.0), INF, where(undefined & ~(pole & (s > 1.0)), NAN, where(pole, INF, value)))


def polynomial_of_steps(s: Real, inverse_square: Real) -> Real:
    """The bracket of Euler's and Maclaurin's formula: Σ B2j/(2j)! (s + 1) … (s + 2j - 2) w^(2 - 2j)."""
    terms = [b / math.factorial(2 * j) for j, b in enumerate(_BERNOULLI, 1)]
    result = s.const(terms[-1])
    for j in range(len(terms) - 1, 0, -1):
        result = result * ((s + (2.0 * j - 1)) * (s + 2.0 * j)) * inverse_square + terms[j - 1]
    return result


#: From this a on the uniform expansion is used where x is near a; elsewhere this many terms suffice.
_LARGE, _TERMS = 60.0, 120
_ORDERS, _POWERS = 5, 13


@functools.cache
def _temme() -> np.ndarray:
    """Coefficients d[n, k] of η^n a^-k in the uniform expansion of the incomplete gamma functions (DLMF 8.12.10-14)."""
    size = _POWERS + 2 * _ORDERS + 2
    alpha = [Fraction(0), Fraction(1), Fraction(1, 3)]
    for n in range(3, size + 2):
        products = sum((j * alpha[j] * alpha[n - j + 1] for j in range(2, n)), Fraction(0))
        alpha.append((alpha[n - 1] - products) / (n + 1))
    first = [Fraction(-1, 3)] + [(n + 2) * alpha[n + 2] for n in range(1, size)]
    orders, stirling = [first], Fraction(1)
    for k in range(1, _ORDERS):
        # The coefficients of Stirling's series of Γ itself: (2k + 1)!! α[2k + 1].
        stirling *= 2 * k + 1
        scale = (-1) ** k * stirling * alpha[2 * k + 1]
        previous = orders[-1]
        orders.append([scale * first[n] + (n + 2) * previous[n + 2] for n in range(len(previous) - 2)])
    return np.array([[float(order[n]) for order in orders] for n in range(_POWERS)])


def _uniform(a: Real, x: Real, lower: bool) -> Real:
    """P or Q for large a and x near it: erfc(∓η √(a/2)) / 2 and a correction, with η²/2 = μ - log(1 + μ), μ = x/a - 1."""
    g = a.g
    mu = (x - a) / a
    # μ - log(1 + μ) = μ s - 2 s³ (1/3 + s²/5 + …) with s = μ / (2 + μ): nothing cancels.
    s = mu / (mu + 2.0)
    phi = mu * s - 2.0 * s * s * s * polynomial(s * s, [1 / (2 * k + 3) for k in range(9, -1, -1)])
    size = (2.0 * phi).sqrt()
    eta = where(mu < 0.0, -size, size)
    inverse = 1.0 / a
    # Row by row of the table, the highest power of η first.
    table = g.const(np.ascontiguousarray(_temme()[::-1]))

    def add_power(step: Real, total: Real) -> list[Real]:
        row = g.op.Gather(table, step.to(INT64).value, axis=0)
        coefficients = [Real(g, g.op.Gather(row, k, axis=0)) for k in range(_ORDERS)]
        in_a = coefficients[-1]
        for coefficient in coefficients[-2::-1]:
            in_a = in_a * inverse + coefficient
        return [total * eta + in_a]

    (series,) = iterate(g.const(_POWERS), add_power, eta * 0.0, name="uniform_terms")
    correction = series * (-(a * phi)).exp() / (2 * PI * a).sqrt()
    root = eta * (a * 0.5).sqrt()
    return 0.5 * erfc(-root) - correction if lower else 0.5 * erfc(root) + correction


def _lower_series(a: Real, x: Real) -> Real:
    """Σ x^n / ((a + 1) … (a + n)), which times x^a e^-x / Γ(a + 1) is P (DLMF 8.11.4)."""

    def add_term(step: Real, term: Real, total: Real) -> list[Real]:
        term = term * (x / (a + (step + 1.0)))
        return [term, total + term]

    one = (a + x) * 0.0 + 1.0
    return iterate(a.g.const(_TERMS), add_term, one, one, name="series_terms")[1]


def _upper_fraction(a: Real, x: Real) -> Real:
    """The continued fraction that times x^a e^-x / Γ(a) is Q (DLMF 8.9.2), by Lentz's algorithm (Thompson, Barnett)."""
    first = x + 1.0 - a

    def convergent(step: Real, c: Real, d: Real, total: Real) -> list[Real]:
        number = step + 1.0
        numerator = number * (a - number)
        b = first + 2.0 * number
        d = 1.0 / (numerator * d + b)
        c = b + numerator / c
        return [c, d, total * (c * d)]

    inverse = 1.0 / first
    return iterate(a.g.const(_TERMS), convergent, first + INF, inverse, inverse, name="fractions")[2]


def _incomplete(a: Real, x: Real, lower: bool) -> Real:
    """P or Q (DLMF 8.2.4): the uniform expansion, the series where x < a + 1, the fraction beyond."""
    # The result is 0 or 1 beyond 1e15 unless x is near a; both are scaled down there, so that nothing overflows.
    scale = where(a > 1e15, 1e15 / a, 1.0)
    b, y = a * scale, x * scale
    weight = (b * y.log() - y - _log_gamma(b + 1.0)).exp()
    below = y < b + 1.0
    series = weight * _lower_series(b, where(below, y, b))
    fraction = weight * b * _upper_fraction(b, where(below, b + 2.0, y))
    value = where(below, series, 1.0 - fraction) if lower else where(below, 1.0 - series, fraction)
    near = (a > _LARGE) & (abs(x - a) < 0.3 * a)
    value = where(near, _uniform(a, x, lower), value)
    at_infinity = where(a.is_inf(), 0.0 if lower else 1.0, value)
    at_infinity = where(x.is_inf(), where(a.is_inf(), NAN, x.const(1.0 if lower else 0.0)), at_infinity)
    # At x = 0 the integral is 0 for every a but zero, NaN included.
    empty = x.equals(0.0) & ~a.equals(0.0)
    return where((a < 0.0) | (x < 0.0), NAN, where(empty, 0.0 if lower else 1.0, at_infinity))


def igamma(a: Real, x: Real) -> Real:
    """igamma(Tensor self, Tensor other) -> Tensor"""
    return _incomplete(a, x, lower=True)


def igammac(a: Real, x: Real) -> Real:
    """igammac(Tensor self, Tensor other) -> Tensor"""
    return _incomplete(a, x, lower=False)


RULES: list[Rule] = [
    *[Rule(f"aten::{name}.default", in_double(lgamma)) for name in ("lgamma", "special_gammaln")],
    *[Rule(f"aten::{name}.default", mvlgamma) for name in ("mvlgamma", "special_multigammaln")],
    *[Rule(f"aten::{name}.default", in_double(digamma)) for name in ("digamma", "special_digamma", "special_psi")],
    *[Rule(f"aten::{name}.default", polygamma) for name in ("polygamma", "special_polygamma")],
    *[
        Rule(f"aten::special_zeta.{overload}", in_double(zeta))
        for overload in ("default", "self_scalar", "other_scalar")
    ],
    *[Rule(f"aten::{name}.default", in_double(igamma)) for name in ("igamma", "special_gammainc")],
    *[Rule(f"aten::{name}.default", in_double(igammac)) for name in ("igammac", "special_gammaincc")],
]
