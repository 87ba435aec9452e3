"""Complex numbers through whole graphs, and Fourier transforms, at sizes that they were not exported with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from tests.support.check import check
from tests.support.tolerances import looser

X = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
INF, NAN = float("inf"), float("nan")
N = torch.export.Dim("n")

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda x: x + 2 * x,
    "alpha": lambda x: torch.add(x, x.conj(), alpha=3 - 1j),
    "mul": lambda x: x * x.conj() * 2.5,
    "div": lambda x: x / (x + 1j),
    "reciprocal": lambda x: 1 / x,
    "real_and_complex": lambda x: x.real * x + x.imag,
    "abs_angle": lambda x: (x.abs(), x.angle()),
    "exp_log": lambda x: (x.exp(), x.log()),
    "sqrt": lambda x: x.sqrt(),
    "trigonometric": lambda x: (x.sin(), x.cos(), x.tan()),
    "hyperbolic": lambda x: (x.sinh(), x.cosh(), x.tanh()),
    "inverse": lambda x: (x.asin(), x.acos(), x.atan(), x.asinh(), x.acosh()),
    "pow": lambda x: (x**2, x ** (0.5 - 1j), 2.0**x),
    "polar": lambda x: torch.polar(x.abs(), x.angle()),
    "sgn": lambda x: x.sgn(),
    "where": lambda x: torch.where(x.real > 0, x, 1j),
    "comparisons": lambda x: (x == x.conj(), x != x, x.isfinite(), x.logical_not()),
    "views": lambda x: (torch.view_as_real(x), torch.view_as_complex(torch.view_as_real(x) * 2)),
    "moved": lambda x: torch.cat([x.t(), x.flip(1).t()]).reshape(2, -1).unsqueeze(0),
    "indexed": lambda x: (x[1:, ::2], x[:, 1], x.select(0, -1)),
    "reduced": lambda x: (x.sum(1), x.mean(), x.var(1), x.std(0), x.prod(1)),
    "products of all": lambda x: (x.prod(), x[:, :2].prod(1, keepdim=True)),
    "filled": lambda x: (
        torch.full_like(x, 2 + 1j),
        x.new_full((2,), 3.0),
        torch.ones_like(x),
        torch.zeros_like(x) + x,
    ),
    "matrices": lambda x: (x @ x.mH, torch.vdot(x[0], x[1])),
    "made": lambda x: torch.complex(x.real, x.real) + torch.zeros(3, 4, dtype=torch.complex64),
    "to_real": lambda x: x.to(torch.complex128).to(torch.complex64) * 1j,
}


def pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_complex(name: str) -> None:
    function = ELEMENTWISE[name]

    def call(x: torch.Tensor) -> Any:
        results = function(x)
        return tuple(map(pairs, results)) if isinstance(results, tuple) else pairs(results)

    other = torch.tensor([[0, 1, -1, 1j], [-1j, 3 + 4j, -2 - 2j, 1e-4], [20 + 1j, -3, 2j, 1e3]], dtype=torch.complex64)
    others = (
        [(X * 3,)]
        if name in ("inverse", "pow", "reciprocal", "div", "hyperbolic", "reduced", "exp_log", "sgn")
        else [(other,)]
    )
    check(call, X, others=others, **looser("complex"))


def numbers(*values: complex) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.complex64)


#: A function, and two tensors whose results other formulas lose.
HARD: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor]] = {
    "log1p of small numbers": (torch.log1p, numbers(1e-6, 2e-5 - 1e-6j, 1e-4j), numbers(-1e-7j, 3, -1 + 2j, 0)),
    "expm1 of small numbers": (torch.expm1, numbers(1e-6, 2e-5 - 1e-6j, 1e-4j), numbers(-1e-7j, 3, -90 + 2j, 0)),
    "atanh near the poles": (torch.atanh, numbers(-1 + 1e-5j, 1 - 1e-5j), numbers(-0.9999, 1.0001, -1 - 1e-3j)),
    "atan near the poles": (torch.atan, numbers(1e-5 + 1j, 1e-5 - 1j), numbers(0.9999j, -1e-3 + 1j, 2)),
    "hyperbolic of large real numbers": (lambda x: (x.sinh(), x.cosh()), numbers(100, -1000), numbers(95 + 0j, 1)),
    "powers to numbers": (
        lambda x: (x**0, x**1, x**2, x**3, x**-1, x**-2, x**0.5, x**-0.5),
        numbers(1 - 1j, 0, 20j),
        numbers(INF, -3, 0.5j, -2 - 3j),
    ),
    "powers of 0": (lambda x: (torch.pow(0, x), (0 * x) ** x), numbers(1, -1, 0.5 + 2j, 0), numbers(2, 1j, -3)),
}


@pytest.mark.parametrize("name", HARD)
def test_complex_of_hard_numbers(name: str) -> None:
    function, first, second = HARD[name]

    def call(x: torch.Tensor) -> Any:
        results = function(x)
        return tuple(map(pairs, results)) if isinstance(results, tuple) else pairs(results)

    check(call, first, others=[(second,)], dynamic=True, **looser("complex, hard numbers"))


def test_products_of_complex_numbers_at_every_size() -> None:
    def call(x: torch.Tensor) -> Any:
        return tuple(map(pairs, (x.prod(), x.prod(0), x.prod(-1, keepdim=True), x.cumprod(0))))

    others = [(torch.randn(shape, dtype=torch.complex64),) for shape in ((2, 5), (0, 4), (3, 0), (1, 1))]
    check(call, X, others=others, dynamic=True, **looser("complex"))
    check(call, X[:0], others=[(X[:0],)])


def test_scalars_of_complex_products() -> None:
    """A beta of zero drops the bias, and a real or symbolic number scales both parts."""

    def call(bias: torch.Tensor, a: torch.Tensor) -> Any:
        sums = [torch.addmm(bias, a, a.mT, beta=beta, alpha=alpha) for beta, alpha in ((0, 1), (2j, 1 - 1j), (0, 3))]
        sums += [torch.addbmm(bias, a[None], a.mT[None], beta=0), torch.add(a, a, alpha=a.shape[0])]
        return tuple(map(pairs, [*sums, torch.addcmul(a, a, a, value=2 - 1j), torch.sub(a, a.conj(), alpha=2j)]))

    bias = torch.full((3, 3), complex(NAN, INF), dtype=torch.complex64)
    check(call, bias, X, others=[(X[:2] @ X[:2].mT, X[:2])], dynamic=True, **looser("complex"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (
            y.sum(dtype=x.dtype),
            y.sum(1, dtype=x.dtype),
            y.mean(1, dtype=x.dtype),
            y.cumsum(0, dtype=x.dtype),
        ),
        lambda x, y: (y.clone().copy_(x), torch.cat([y, y]).slice_scatter(y.clone().copy_(x), 0, 0, y.shape[0])),
        lambda x, y: (
            x.view(torch.float32) * 2,
            torch.cat([y, y], 1).view(torch.complex64) * 2,
            x.view(torch.complex64),
        ),
        lambda x, y: torch.broadcast_tensors(x[:, :1], y),
        lambda x, y: x.index_add(1, torch.tensor([1, 0, 1]), x[:, :3], alpha=1 - 2j),
        lambda x, y: (x == y.double() + 1e-9, x != y.double(), x.real == x),
    ],
    ids=["sums of real numbers", "copies into real numbers", "bits", "broadcast", "index_add", "comparisons"],
)
def test_real_and_complex(function: Callable[..., Any]) -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> Any:
        results = function(x, y)
        return tuple(map(pairs, results)) if isinstance(results, tuple) else pairs(results)

    others = [(torch.complex(x, 0 * x), x) for x in (X.imag * 3, X.real[:1])]
    check(call, X, X.real.clone(), others=others, dynamic=({0: N}, {0: N}), **looser("complex"))


def test_a_product_scattered_into_complex_numbers_is_refused() -> None:
    with pytest.raises(onnxplug.OnnxplugError, match="reduce='multiply'"):
        onnxplug.to_onnx(lambda x: x.scatter(0, torch.tensor([[0, 0]]), x[:1, 1:3], reduce="multiply").abs(), (X,))


def test_complex_inputs_and_outputs_are_pairs() -> None:
    program = onnxplug.to_onnx(lambda x: x * 1j, (X,), verify=True)
    assert [list(v.shape) for v in program.model.graph.inputs] == [[3, 4, 2]]
    assert program.model.graph.inputs[0].dtype.name == "FLOAT"
    (result,) = program(X)
    torch.testing.assert_close(torch.view_as_complex(result), X * 1j)


def test_complex_parameters_and_buffers() -> None:
    class Rotation(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(X[:, :3].clone())
            self.register_buffer("phase", torch.tensor([1j, -1, 1], dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real((x @ self.weight) * self.phase)

    check(Rotation(), X.t().contiguous(), others=[(X.t().contiguous() * 2,)], dynamic=None)


def test_rotary_embedding_by_complex_numbers() -> None:
    """Rotary embedding with complex numbers, as in Llama's original code."""
    frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), frequencies)
        rotations = torch.polar(torch.ones_like(angles), angles)
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * rotations[None, :, None]).flatten(3).type_as(x)

    check(
        rotate,
        torch.randn(2, 5, 3, 8),
        others=[(torch.randn(1, 9, 3, 8),), (torch.randn(3, 1, 3, 8),)],
        dynamic=({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},),
    )


FOURIER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x)),
    "fft_cut": lambda x: torch.view_as_real(torch.fft.fft(x, n=5, norm="ortho")),
    "fft_filled": lambda x: torch.view_as_real(torch.fft.fft(x, n=20, norm="forward")),
    "ifft": lambda x: torch.view_as_real(torch.fft.ifft(x, dim=0).resolve_conj()),
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "rfft_n": lambda x: torch.view_as_real(torch.fft.rfft(x, n=7)),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "irfft_odd": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=9),
    "hfft": lambda x: torch.fft.hfft(torch.fft.fft(x)),
    "ihfft": lambda x: torch.view_as_real(torch.fft.ihfft(x).resolve_conj()),
    "fft2": lambda x: torch.view_as_real(torch.fft.fft2(x)),
    "rfftn": lambda x: torch.view_as_real(torch.fft.rfftn(x, s=(4, 6))),
    "irfft2": lambda x: torch.fft.irfft2(torch.fft.fft2(x)),
    "fftshift": lambda x: torch.fft.fftshift(x, dim=0),
}


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", FOURIER)
def test_fourier(name: str, opset: int) -> None:
    check(
        FOURIER[name],
        torch.randn(6, 12),
        others=[(torch.randn(4, 16),), (torch.randn(3, 15),)],
        dynamic=({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},),
        opset=opset,
        **looser("complex, float"),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 100, 127, 128, 1000, 1024])
def test_fourier_is_exact_at_every_size(size: int) -> None:
    x = torch.randn(2, size, dtype=torch.float64)
    call = lambda x: torch.view_as_real(torch.fft.fft(x))  # noqa: E731
    check(call, x, others=[(x * 3,)], rtol=1e-9, atol=1e-9)
    check(call, x.float(), others=[(x.float() * 3,)], **looser("complex, float"))


@pytest.mark.parametrize("size", [127, 256, 1000, 1024, 4096])
def test_fourier_in_float_is_as_exact_as_pytorch(size: int) -> None:
    """Against a transform in double: errors are at most PyTorch's."""
    x = 10 * torch.randn(8, size)
    program = onnxplug.to_onnx(lambda x: torch.view_as_real(torch.fft.fft(x)), (x,))
    exact = torch.view_as_real(torch.fft.fft(x.double()))
    theirs = (torch.view_as_real(torch.fft.fft(x)) - exact).abs().max()
    assert (program(x)[0] - exact).abs().max() <= theirs


@pytest.mark.parametrize("center", [True, False])
def test_spectrogram(center: bool) -> None:
    """stft of a dynamic length, and back again."""
    window = torch.hann_window(32)

    def spectrogram(x: torch.Tensor) -> torch.Tensor:
        return torch.stft(x, 32, hop_length=8, window=window, center=center, return_complex=True).abs()

    check(
        spectrogram,
        torch.randn(2, 200),
        others=[(torch.randn(3, 333),), (torch.randn(1, 64),)],
        dynamic=({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim(name="samples", min=64, max=4096)},),
        **looser("complex, float"),
    )
