"""The error function, the normal distribution's functions, entropies."""

from __future__ import annotations

import math

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers import cephes as cephes
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT
from onnxplug.converters.helpers.error_function import erf, erf_near, erfc, scaled_tail
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.real import INF, PI, Real, in_double, in_float, polynomial, ratio, where
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def error_function(g: GraphBuilder, node: FxNode) -> Value:
    """erf(Tensor self) -> Tensor"""
    inner = computed_in(g, "Erf", node.dtype)
    return g.cast(erf(Real(g, operand(g, node.args[0], inner), inner)).value, node.dtype)


def erfcx(g: GraphBuilder, node: FxNode) -> Value:
    """special_erfcx(Tensor self) -> Tensor

    exp(x²) erfc(x): about 1/(√π x) at large x, 2 exp(x²) at large negative x, where x² is rounded as in torch.
    """
    x = Real(g, operand(g, node.args[0], DOUBLE))
    tail = scaled_tail(abs(x))
    growth = (x * x).rounded(node.dtype).exp()
    far = where(x < 0.0, 2.0 * growth - tail, tail)
    return g.cast(where(abs(x) < 1.0, growth * (1.0 - erf_near(x)), far).value, node.dtype)


def ndtr(g: GraphBuilder, node: FxNode) -> Value:
    """special_ndtr(Tensor self) -> Tensor

    torch computes (1 + erf(x / √2)) / 2 with each step rounded to the dtype, and so does this form: half types must
    agree.
    """
    dtype = DOUBLE if node.dtype == DOUBLE else FLOAT
    t = (Real(g, operand(g, node.args[0], dtype), dtype) / math.sqrt(2)).rounded(node.dtype)
    return g.cast(((erf(t).rounded(node.dtype) + 1.0).rounded(node.dtype) * 0.5).value, node.dtype)


def log_ndtr(x: Real) -> Real:
    """special_log_ndtr(Tensor self) -> Tensor

    log(erfcx(t)/2) - t² with t = -x/√2 below -1, where the probability itself underflows.
    """
    t = x * -math.sqrt(0.5)
    left = (scaled_tail(t) * 0.5).log() - t * t
    # Between -√2 and -1 the tail's formula is inexact, and the plain formula loses no digits.
    right = (erfc(-t) * -0.5).log1p()
    return where(t > 1.0, left, right)


def _quantile_tail(p: Real) -> Real:
    """-ndtri(p) where p <= exp(-2) (Cephes ndtri.c)."""
    z = (-2.0 * p.log()).sqrt()
    inverse = 1.0 / z
    inner = ratio(inverse, cephes.NDTRI_P1, cephes.NDTRI_Q1)
    outer = ratio(inverse, cephes.NDTRI_P2, cephes.NDTRI_Q2)
    return where(p.equals(0.0), INF, z - z.log() / z - inverse * where(z < 8.0, inner, outer))


def _quantile_centre(y: Real) -> Real:
    """ndtri(1/2 + y) where |y| <= 1/2 - exp(-2) (Cephes ndtri.c)."""
    square = y * y
    return (y + y * (square * ratio(square, cephes.NDTRI_P0, cephes.NDTRI_Q0))) * math.sqrt(2 * PI)


def ndtri(p: Real) -> Real:
    """special_ndtri(Tensor self) -> Tensor

    NaN outside of [0, 1], as the logarithm there.
    """
    upper = p > 1.0 - math.exp(-2)
    tail = _quantile_tail(where(upper, 1.0 - p, p))
    return where(upper, tail, where(p > math.exp(-2), _quantile_centre(p - 0.5), -tail))


def erfinv(y: Real) -> Real:
    """erfinv(Tensor self) -> Tensor

    ndtri((1 + y) / 2) / √2, from y itself near zero and from (1 - |y|) / 2 in the tails: neither loses a digit.
    """
    size = abs(y)
    tail = _quantile_tail((1.0 - size) * 0.5)
    centre = _quantile_centre(y * 0.5)
    return where(size > 1.0 - 2 * math.exp(-2), where(y < 0.0, -tail, tail), centre) * math.sqrt(0.5)


def entr(x: Real) -> Real:
    """special_entr(Tensor self) -> Tensor

    -x log(x), 0 at 0, -inf below.
    """
    return where(x.equals(0.0), 0.0, where(x < 0.0, -INF, -x * x.log()))


def xlogy(x: Real, y: Real) -> Real:
    """xlogy.Tensor(Tensor self, Tensor other) -> Tensor

    0 where x is 0 and y is not NaN.
    """
    return where(x.equals(0.0) & ~y.is_nan(), 0.0, x * y.log())


def xlog1py(x: Real, y: Real) -> Real:
    """special_xlog1py(Tensor self, Tensor other) -> Tensor"""
    return where(x.equals(0.0) & ~y.is_nan(), 0.0, x * y.log1p())


def sinc(x: Real) -> Real:
    """sinc(Tensor self) -> Tensor"""
    angle = x * PI
    return where(x.equals(0.0), 1.0, angle.sin() / angle)


def spherical_bessel_j0(x: Real) -> Real:
    """special_spherical_bessel_j0(Tensor x) -> Tensor

    sin(x)/x, by its series near zero.
    """
    series = polynomial(x * x, [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    return where(x.is_inf(), 0.0, where(abs(x) < 0.5, series, x.sin() / x))


def logit(g: GraphBuilder, node: FxNode) -> Value:
    """logit(Tensor self, float? eps=None) -> Tensor

    Clamped by comparisons: with eps above 1/2 the bounds cross, and NaN must remain. The bounds are rounded to the
    dtype, in which 1 - eps may be 1, and so is each step, as in torch, whose error in half types at 1/2 is many
    roundings.
    """
    value, eps = node.args
    dtype = DOUBLE if node.dtype == DOUBLE else FLOAT
    x = Real(g, operand(g, value, dtype), dtype)
    if eps is not None:
        low, high = (Real(g, g.const(bound, node.dtype), node.dtype).to(dtype) for bound in (eps, 1.0 - eps))
        x = where(x < low, low, where(x > high, high, x))
    odds = (x / (1.0 - x).rounded(node.dtype)).rounded(node.dtype)
    return g.cast(odds.log().value, node.dtype)


def _rows(formula: Converter, names: str, *overloads: str) -> list[Rule]:
    return [
        Rule(f"aten::{name}.{overload}", formula) for name in names.split() for overload in overloads or ("default",)
    ]


RULES: list[Rule] = [
    *_rows(error_function, "erf special_erf"),
    *_rows(in_double(erfc), "erfc special_erfc"),
    *_rows(erfcx, "special_erfcx"),
    *_rows(in_double(erfinv), "erfinv special_erfinv"),
    *_rows(ndtr, "special_ndtr"),
    *_rows(in_double(log_ndtr), "special_log_ndtr"),
    *_rows(in_double(ndtri), "special_ndtri"),
    *_rows(in_float(entr), "special_entr"),
    *_rows(in_float(xlogy), "xlogy", "Tensor", "Scalar_Self", "Scalar_Other"),
    *_rows(in_float(xlogy), "special_xlogy", "default", "self_scalar", "other_scalar"),
    *_rows(in_float(xlog1py), "special_xlog1py", "default", "self_scalar", "other_scalar"),
    *_rows(in_float(sinc), "sinc special_sinc"),
    *_rows(in_double(spherical_bessel_j0), "special_spherical_bessel_j0"),
    *_rows(logit, "logit special_logit"),
]
