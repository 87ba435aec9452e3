"""Bessel functions of orders 0 and 1, ordinary and modified, and Airy's function (Cephes: j0.c, j1.c, i0.c … airy.c)."""

from __future__ import annotations

import math

from onnxplug.converters.helpers import cephes as cephes
from onnxplug.converters.helpers.real import INF, NAN, PI, Real, chebyshev, in_double, polynomial, ratio, where
from onnxplug.registry.rule import Rule


def _phase(x: Real, order: int) -> tuple[Real, Real, Real]:
    """Beyond 5: P and Q and the angle of Hankel's form (A&S 9.2.5-6), both with the factor √(2/πx)."""
    z = 25.0 / (x * x)
    table = vars(cephes)
    pp, pq, qp, qq = (table[f"J{order}_{name}"] for name in ("PP", "PQ", "QP", "QQ"))
    scale = math.sqrt(2 / PI) / x.sqrt()
    return ratio(z, pp, pq) * scale, ratio(z, qp, qq) * (5.0 / x) * scale, x - (2 * order + 1) * PI / 4


def _j0_near(x: Real) -> Real:
    """J0 up to 5: the factors of its first two zeros times a rational function."""
    square = x * x
    zeros = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    return zeros * ratio(square, cephes.J0_RP, cephes.J0_RQ)


def _j1_near(x: Real) -> Real:
    """J1 up to 5."""
    square = x * x
    zeros = x * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    return zeros * ratio(square, cephes.J1_RP, cephes.J1_RQ)


def bessel_j0(x: Real) -> Real:
    """special_bessel_j0(Tensor self) -> Tensor"""
    size = abs(x)
    p, q, angle = _phase(size, 0)
    return where(size <= 5.0, _j0_near(x), p * angle.cos() - q * angle.sin())


def bessel_j1(x: Real) -> Real:
    """special_bessel_j1(Tensor self) -> Tensor"""
    size = abs(x)
    p, q, angle = _phase(size, 1)
    far = p * angle.cos() - q * angle.sin()
    # ONNX Runtime's Where keeps -0.0 only in its last operand: it adds a zero to the elements of the other operand.
    return where(size > 5.0, where(x < 0.0, -far, far), _j1_near(x))


def bessel_y0(x: Real) -> Real:
    """special_bessel_y0(Tensor self) -> Tensor

    -inf at zero, NaN below.
    """
    square = x * x
    near = ratio(square, cephes.Y0_P, cephes.Y0_Q) + _j0_near(x) * x.log() * (2 / PI)
    p, q, angle = _phase(x, 0)
    far = p * angle.sin() + q * angle.cos()
    return where(x.equals(0.0), -INF, where(x <= 5.0, near, far))


def bessel_y1(x: Real) -> Real:
    """special_bessel_y1(Tensor self) -> Tensor"""
    square = x * x
    near = x * ratio(square, cephes.Y1_P, cephes.Y1_Q) + (_j1_near(x) * x.log() - 1.0 / x) * (2 / PI)
    p, q, angle = _phase(x, 1)
    far = p * angle.sin() + q * angle.cos()
    return where(x.equals(0.0), -INF, where(x <= 5.0, near, far))


def _i0e_near(size: Real) -> Real:
    """exp(-x) I0(x) on [0, 8]."""
    return chebyshev(size * 0.25 - 1.0, cephes.I0_A)


def _i1e_near(size: Real) -> Real:
    """exp(-x) I1(x) / x on [0, 8]."""
    return chebyshev(size * 0.25 - 1.0, cephes.I1_A)


def i0e(x: Real) -> Real:
    """special_i0e(Tensor self) -> Tensor"""
    size = abs(x)
    return where(size <= 8.0, _i0e_near(size), chebyshev(16.0 / size - 1.0, cephes.I0_B) / size.sqrt())


def i0(x: Real) -> Real:
    """i0(Tensor self) -> Tensor

    The result is NaN at infinity, as in PyTorch.
    """
    return abs(x).exp() * i0e(x)


def i1e(x: Real) -> Real:
    """special_i1e(Tensor self) -> Tensor"""
    size = abs(x)
    near = _i1e_near(size) * x
    far = chebyshev(16.0 / size - 1.0, cephes.I1_B) / size.sqrt()
    return where(size <= 8.0, near, where(x < 0.0, -far, far))


def i1(x: Real) -> Real:
    """special_i1(Tensor self) -> Tensor"""
    return abs(x).exp() * i1e(x)


def _k0_near(x: Real) -> Real:
    """K0 up to 2: its series and its logarithm."""
    return chebyshev(x * x * 0.5 - 1.0, cephes.K0_A) - (x * 0.5).log() * (x.exp() * _i0e_near(x))


def _k1_near(x: Real) -> Real:
    """K1 up to 2."""
    return chebyshev(x * x * 0.5 - 1.0, cephes.K1_A) / x + (x * 0.5).log() * (x.exp() * x * _i1e_near(x))


def _decaying(x: Real, near: Real, far: Real) -> Real:
    """inf at zero, NaN below."""
    return where(x.equals(0.0), INF, where(x < 0.0, NAN, where(x <= 2.0, near, far)))


def _k_far(x: Real, order: int) -> Real:
    """exp(x) K(x) beyond 2."""
    return chebyshev(4.0 / x - 1.0, cephes.K1_B if order else cephes.K0_B) / x.sqrt()


def modified_bessel_k0(x: Real) -> Real:
    """special_modified_bessel_k0(Tensor self) -> Tensor"""
    return _decaying(x, _k0_near(x), (-x).exp() * _k_far(x, 0))


def modified_bessel_k1(x: Real) -> Real:
    """special_modified_bessel_k1(Tensor self) -> Tensor"""
    return _decaying(x, _k1_near(x), (-x).exp() * _k_far(x, 1))


def scaled_modified_bessel_k0(x: Real) -> Real:
    """special_scaled_modified_bessel_k0(Tensor x) -> Tensor"""
    return _decaying(x, _k0_near(x) * x.exp(), _k_far(x, 0))


def scaled_modified_bessel_k1(x: Real) -> Real:
    """special_scaled_modified_bessel_k1(Tensor x) -> Tensor"""
    return _decaying(x, _k1_near(x) * x.exp(), _k_far(x, 1))


def _airy_near(x: Real) -> Real:
    """Ai between -2.09 and 2.09 by its power series (A&S 10.4.2-5): twelve terms of each part, in x³."""
    even, odd = [1.0], [1.0]
    for k in range(1, 12):
        even.append(even[-1] / ((3 * k - 1) * (3 * k)))
        odd.append(odd[-1] / ((3 * k) * (3 * k + 1)))
    cube = x * x * x
    first = polynomial(cube, even[::-1]) * 0.355028053887817239260
    return first - x * polynomial(cube, odd[::-1]) * 0.258819403792806798405


def airy_ai(x: Real) -> Real:
    """special_airy_ai(Tensor x) -> Tensor

    Beyond 2.09 on either side by asymptotic forms in ζ = 2/3 |x|^(3/2). NaN at both infinities, as in torch.
    """
    size = abs(x)
    root = size.sqrt()
    zeta = size * root * (2 / 3)
    inverse = 1.0 / zeta
    square = inverse * inverse
    amplitude = 1 / math.sqrt(PI) / root.sqrt()
    decay = amplitude * ratio(inverse, cephes.AIRY_AN, cephes.AIRY_AD) / (2.0 * zeta.exp())
    angle = zeta + PI / 4
    sine = angle.sin() * (1.0 + square * ratio(square, cephes.AIRY_AFN, cephes.AIRY_AFD))
    wave = amplitude * (sine - angle.cos() * (inverse * ratio(square, cephes.AIRY_AGN, cephes.AIRY_AGD)))
    value = where(x >= 2.09, decay, where(x < -2.09, wave, _airy_near(x)))
    return where(x.is_inf(), NAN, where(x > 103.892, 0.0, value))


RULES: list[Rule] = [
    *[Rule(f"aten::{name}.default", in_double(i0)) for name in ("i0", "special_i0", "special_modified_bessel_i0")],
    *[Rule(f"aten::{name}.default", in_double(i1)) for name in ("special_i1", "special_modified_bessel_i1")],
    *[
        Rule(f"aten::special_{formula.__name__}.default", in_double(formula))
        for formula in (
            bessel_j0, bessel_j1, bessel_y0, bessel_y1, i0e, i1e, modified_bessel_k0, modified_bessel_k1,
            scaled_modified_bessel_k0, scaled_modified_bessel_k1, airy_ai,
        )
    ],
]  # fmt: skip
