"""Special functions on hard values: a row a function, float64 and float32, other sizes, the edges of their domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import special

from tests.support.check import check
from tests.support.tolerances import looser

INF, NAN = float("inf"), float("nan")
EDGES = [0.0, -0.0, INF, -INF, NAN]
#: Numbers on both sides of every boundary between two formulas; whole, half, tiny and huge numbers.
LINE = torch.tensor(
    [*EDGES, 1e-300, 1e-30, -1e-30, 1e-8, 0.3, 0.499, 0.5, -0.5, 0.999, 1.0, -1.0, 1.001, -1.3, 1.4, -1.5, 2.0, 2.08, 2.1,
     -2.0, -2.08, -2.1, 2.5, -3.7, 4.99, 5.01, -5.01, 6.0, -6.0, 7.99, 8.0, 8.01, -8.01, 9.9, 10.0, -12.25, 19.5, -20.0,
     26.0, -26.5, 30.5, 60.0, -61.3, 87.0, 104.0], dtype=torch.float64,
)  # fmt: skip
HUGE = torch.tensor([[1e10, -1e10, 1e20], [-1e20, 1e200, -1e200]], dtype=torch.float64)
UNIT = torch.tensor(
    [*EDGES, 1.0, -1.0, 1.5, 1e-300, 1e-20, -1e-20, 0.13, 0.14, 0.5, -0.5, 0.7, 0.73, -0.74, 0.86, 0.87, 0.999999,
     -0.999999, 1 - 1e-15], dtype=torch.float64,
)  # fmt: skip

LINES: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ["digamma", "erf", "erfc", "exp2", "i0", "lgamma", "log1p", "sinc"]},
    **{
        name: getattr(special, name)
        for name in [
            "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "entr", "erfcx", "gammaln", "i0e", "i1", "i1e",
            "log_ndtr", "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "ndtr",
            "psi", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0",
        ]
    },
    "polygamma_0": lambda x: torch.polygamma(0, x),
    "polygamma_2": lambda x: torch.polygamma(2, x),
    "polygamma_5": lambda x: special.polygamma(5, x),
    "mvlgamma": lambda x: torch.mvlgamma(x, 3),
    "multigammaln": lambda x: special.multigammaln(x, 2),
}  # fmt: skip
UNITS: dict[str, Callable[..., Any]] = {
    "erfinv": torch.erfinv,
    "ndtri": special.ndtri,
    "logit": torch.logit,
    "logit_eps": lambda x: torch.logit(x, 0.01),
    "logit_crossed": lambda x: special.logit(x, 0.7),
}


@pytest.mark.parametrize("name", LINES)
def test_on_the_line(name: str) -> None:
    others = [(LINE[-1].reshape(1),), (LINE[5:5],), (HUGE.flatten()[:4] if name in _WIDE else LINE[7:30],)]
    check(LINES[name], LINE, others=others, dynamic=True)


def test_gelu_in_float64() -> None:
    x = torch.tensor([-30.0, -6.0, -1.0, -0.0, 1e-9, 0.5, 3.0, 40.0, INF, NAN], dtype=torch.float64)
    check(torch.nn.functional.gelu, x, others=[(x.flip(0),)])


@pytest.mark.parametrize("name", ["erf", "bessel_j1", "erfinv", "digamma"])
def test_negative_zero(name: str) -> None:
    function = UNITS.get(name) or LINES[name]
    for dtype in (torch.float32, torch.float64):
        check(lambda x: torch.sign(1.0 / function(x)), torch.tensor([0.0, -0.0, 0.5], dtype=dtype))


#: Functions whose values by torch at 1e20 are exact enough to be compared.
_WIDE = {"erf", "erfc", "exp2", "i0", "i0e", "i1", "i1e", "lgamma", "gammaln", "digamma", "psi", "log_ndtr", "log1p"}


@pytest.mark.parametrize("name", LINES)
def test_in_float32(name: str) -> None:
    limit = 40.0 if name != "airy_ai" else 20.0
    x = LINE[(LINE.abs() < limit) | ~LINE.isfinite()].float()
    check(LINES[name], x, others=[(x.flip(0),)])


@pytest.mark.parametrize("name", UNITS)
def test_on_the_unit_interval(name: str) -> None:
    check(UNITS[name], UNIT, others=[(UNIT[3:3],), (UNIT[5:6],)], dynamic=True)
    check(UNITS[name], UNIT.float(), others=[(UNIT.flip(0).float(),)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    "name", ["digamma", "lgamma", "erf", "erfc", "exp2", "i0", "sinc", "ndtr", "polygamma_2", "mvlgamma"]
)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    if name == "mvlgamma" and dtype == torch.bool:
        pytest.skip("torch itself has none")
    x = torch.tensor([0, 1, 2, 3, 5, 9]).to(dtype)
    if dtype.is_floating_point:
        x = x + torch.tensor([0.5, 0.25, 0.75, 0.125, 0.5, 0.0]).to(dtype)
    check(LINES[name], x, others=[(x.flip(0),)])


@pytest.mark.parametrize("name", ["digamma", "erfcx", "i0", "modified_bessel_k0", "polygamma_2", "mvlgamma"])
def test_no_dimension(name: str) -> None:
    check(LINES[name], torch.tensor(0.75), others=[(torch.tensor(12.5),)])


@pytest.mark.parametrize("opset", [13, 26])
def test_opsets(opset: int) -> None:
    def several(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.polygamma(3, x),
            torch.igamma(x.abs(), n.abs()),
            special.zeta(n, x),
            special.legendre_polynomial_p(x, n),
            torch.mvlgamma(x.abs() + 3, 3),
        )

    x = torch.tensor([0.5, -1.25, 3.0], dtype=torch.float64)
    n = torch.tensor([2.0, 5.0, 3.0], dtype=torch.float64)
    check(several, x, n, others=[(-x, n + 1)], opset=opset)


def test_trigamma() -> None:
    x = torch.tensor([*EDGES, 0.1, 0.49, 0.5, 0.51, -0.3, -1.5, -10.25, 7.0, 100.0, 1e10])
    check(lambda x: torch.polygamma(1, x), x, others=[(x.flip(0),)])
    check(lambda x: torch.polygamma(1, x), x.double(), others=[(x.flip(0).double(),)])
    # At a pole torch's result follows from the sine of a rounded angle.
    check(lambda x: torch.polygamma(1, x), torch.tensor([-1.0, -2.0, -3.0]))


def _pairs(first: list[float], second: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.meshgrid(
        torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64), indexing="ij"
    )
    return a.flatten(), b.flatten()


@pytest.mark.parametrize("function", [torch.igamma, torch.igammac])
def test_incomplete_gamma(function: Callable[..., Any]) -> None:
    scales = [1e-300, 1e-10, 0.1, 0.5, 0.9, 1.0, 1.5, 5.0, 19.0, 21.0, 59.0, 61.0, 150.0, 1e3, 1e6, 1e10, 1e15, 1e300]
    a, ratio = _pairs(scales, [1e-12, 0.1, 0.69, 0.71, 0.95, 0.9999, 1.0, 1.0001, 1.05, 1.29, 1.31, 2.0, 50.0])
    edges = _pairs([0.0, -1.0, 0.3, 7.0, INF, -INF, NAN], [0.0, -0.0, 0.5, 1.0, 3.0, -2.0, INF, NAN])
    deviations, width = _pairs([30.0, 70.0, 300.0, 1e5, 1e8], [-5.0, -3.0, -0.5, 0.0, 0.5, 2.0, 4.0])
    near = (deviations, deviations + width * deviations.sqrt())
    check(function, a, a * ratio, others=[edges, near, (a[:1], a[:1])], dynamic=True)
    modest = a < 1e5
    check(function, a[modest].float(), (a * ratio)[modest].float())
    check(
        function, torch.rand(3, 1, 4) * 5, torch.rand(2, 1) * 5, others=[(torch.rand(3, 1, 4) * 90, torch.rand(2, 1))]
    )
    check(function, torch.rand(0, 4), torch.rand(4))


def test_zeta() -> None:
    s = [1.0, 1.1, 1.5, 2.0, 3.0, 7.0, 20.0, 50.0, 1000.0, 1e300, 0.5, -1.0, INF, -INF, NAN]
    q = [
        1e-10,
        0.1,
        0.5,
        1.0,
        2.5,
        9.0,
        15.0,
        1e4,
        1e100,
        -0.1,
        -1.5,
        -2.0,
        -10.3,
        -50.5,
        0.0,
        -0.0,
        INF,
        -INF,
        NAN,
        -1e30,
    ]
    pairs = _pairs(s, q)
    check(special.zeta, *pairs, others=[(pairs[0][:0], pairs[1][:0]), (pairs[0][60:61], pairs[1][60:61])], dynamic=True)
    check(special.zeta, pairs[0].float(), pairs[1].float())
    check(lambda q: special.zeta(3, q), torch.tensor([[0.5, 2.0], [-0.5, 30.0]]), others=[(torch.rand(2, 2),)])
    check(lambda s: special.zeta(s, 2.0), torch.tensor([2, 3, 4]), others=[(torch.tensor([5, 1, 9]),)])
    check(
        special.zeta, torch.tensor([[2.0], [3.0]]), torch.rand(3) + 0.1, others=[(torch.rand(2, 1) + 1, torch.rand(3))]
    )


VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-30, 1e30, -1e30, 100.0, -100.0, 88.0, INF, -INF, NAN, 2e-38, 3.0, 1e-8]


@pytest.mark.parametrize("function", [torch.xlogy, special.xlogy, special.xlog1py, torch.logaddexp, torch.logaddexp2])
def test_of_two(function: Callable[..., Any]) -> None:
    pairs = _pairs(VALUES, VALUES)
    check(function, *pairs, others=[(pairs[0][:0], pairs[1][:0]), (pairs[0][20:21], pairs[1][20:21])], dynamic=True)
    check(function, pairs[0].float(), pairs[1].float())
    check(function, torch.rand(2, 1), torch.rand(3), others=[(-torch.rand(2, 1), torch.rand(3) * 9)])
    if "logaddexp" not in function.__name__:
        x = torch.tensor([0, 1, 4])
        check(lambda x: (function(x, 2.5), function(0.0, x), function(2, x)), x, others=[(torch.tensor([7, 0, 2]),)])
        check(function, torch.tensor([0.0, 0.5, 2.0]).half(), torch.tensor([0.0, 3.0, 0.25]).half())


FAMILIES = [
    *[f"chebyshev_polynomial_{kind}" for kind in "tuvw"],
    *[f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"],
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_polynomials(name: str) -> None:
    function = getattr(special, name)
    points = [-20.0, -3.0, -1.0, -0.99, -0.5, 0.0, -0.0, 0.1, 0.5, 0.75, 1.0, 1.5, 3.0, 1e10, INF, -INF]
    x, n = _pairs(points, [-3.0, -1.0, -0.5, 0.0, 0.7, 1.0, 2.0, 2.9, 3.0, 5.0, 7.0, 10.0, 40.0, INF, -INF, NAN])
    # NaN, and degrees of only some elements; torch's result for NaN at degree 2 is undefined.
    nan = _pairs([NAN, 2.0], [-1.0, 0.0, 1.0, 3.0, 8.0])
    check(function, x, n, others=[nan, (x[:0], n[:0]), (x[100:101], n[100:101])], dynamic=True)
    small = n.abs() <= 7
    check(function, x[small].float(), n[small].float(), **looser("special"))
    # Degrees at which float32 overflows: torch gives infinity, then NaN.
    check(function, *(v.float() for v in _pairs([-1e10, 50.0, 1e37], [1.0, 2.0, 3.0, 4.0, 5.0, 23.0, 30.0, 100.0])))
    check(
        lambda x: function(x, 6),
        torch.linspace(-1, 1, 6).reshape(2, 3),
        others=[(torch.linspace(0.1, 3, 6).reshape(2, 3),)],
    )
    check(lambda n: function(0.3, n), torch.tensor([0, -1, 2, 5]), others=[(torch.tensor([7, 1, 3, -9]),)])
    check(function, torch.rand(2, 1), torch.tensor([0, 3, 4]), others=[(torch.rand(2, 1), torch.tensor([1, -1, 6]))])
    check(function, torch.tensor(0.3), torch.tensor(4))


@pytest.mark.parametrize("name", ["hermite_polynomial_h", "hermite_polynomial_he"])
def test_hermite_polynomials_of_high_degree(name: str) -> None:
    x, n = _pairs([0.5, 2.0, 100.0], [127.0, 128.0, 129.0, 511.0, 512.0, 513.0])
    check(getattr(special, name), x, n)
    check(getattr(special, name), x.float(), n.float(), **looser("special, polynomials"))
