"""The error function and its complement, by the approximations of Cephes."""

from __future__ import annotations

from onnxplug.converters.helpers import cephes as cephes
from onnxplug.converters.helpers.real import Real, ratio, where
from onnxplug.converters.helpers.runtimes import has_kernel


def erf_near(x: Real) -> Real:
    """erf where |x| < 1 (Cephes ndtr.c)."""
    return x * ratio(x * x, cephes.ERF_T, cephes.ERF_U)


def scaled_tail(x: Real) -> Real:
    """exp(x²) erfc(x) where x >= 1 (Cephes ndtr.c); the outer form in 1/x, which can't overflow."""
    inverse = 1.0 / x
    outer = inverse * ratio(inverse, cephes.ERFC_R[::-1], cephes.ERFC_S[::-1])
    return where(x < 8.0, ratio(x, cephes.ERFC_P, cephes.ERFC_Q), outer)


def erf(x: Real) -> Real:
    """erf(Tensor self) -> Tensor

    ONNX's Erf, or rational approximations where it has no kernel for doubles.
    """
    if has_kernel(x.g, "Erf", x.dtype):
        return x.apply("Erf")
    far = 1.0 - (-(x * x)).exp() * scaled_tail(abs(x))
    # In this order -0.0 is kept: ONNX Runtime's Where adds a zero to elements of its second operand.
    return where(abs(x) >= 1.0, where(x < 0.0, -far, far), erf_near(x))


def erfc(x: Real) -> Real:
    """erfc(Tensor self) -> Tensor

    1 - erf(x) would lose all digits from x = 6 on.
    """
    far = (-(x * x)).exp() * scaled_tail(abs(x))
    return where(abs(x) < 1.0, 1.0 - erf_near(x), where(x < 0.0, 2.0 - far, far))
