"""Eigenvalues of general matrices: order and phases of vectors are free, so sets and residuals are compared."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import onnxplug
from tests.support.check import Call, check
from tests.support.tolerances import looser

linalg = torch.linalg
AUTO = torch.export.Dim.AUTO
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
#: The allowed error of the eigenvalues: this many times rounding, the number of rows and the eigenvectors' condition
#: (Bauer-Fike); LAPACK's own is 5 to 15 times less than ours at most.
_BOUND = 16


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@cache
def program_of(shape: tuple[int, ...] | None, dtype: torch.dtype, opset: int | None = None) -> onnxplug.OnnxProgram:
    """The program for one shape, or for every stack of matrices."""
    example = random(*(shape or (2, 4, 4)), dtype=dtype)
    dynamic = None if shape else ((dict.fromkeys(range(3), AUTO),),)
    call = Call(lambda x: (*linalg.eig(x), linalg.eigvals(x)))
    return onnxplug.to_onnx(call, (example,), dynamic_shapes=dynamic, opset_version=opset)


def results(program: onnxplug.OnnxProgram, x: Tensor) -> list[Tensor]:
    result = program(torch.view_as_real(x) if x.is_complex() and not x.numel() else x)
    return [torch.complex(y[..., 0], y[..., 1]) for y in result]


def distance(one: Tensor, other: Tensor) -> float:
    """The largest distance of two sets of numbers, each number paired with the closest one left."""
    rest, worst = other.tolist(), 0.0
    for value in one.tolist():
        closest = min(rest, key=lambda number: abs(number - value))
        rest.remove(closest)
        worst = max(worst, abs(closest - value))
    return worst


def compare(program: onnxplug.OnnxProgram, x: Tensor, condition: float | None = None) -> None:
    """Eigenvalues and vectors of a stack of matrices against eager's.

    Args:
        program: The program that computes them.
        x: The matrices.
        condition: How much larger than rounding the eigenvalues' errors may be; by default their vectors' condition.
    """
    values, vectors, alone = results(program, x)
    expected, their_vectors = linalg.eig(x)
    assert values.shape == alone.shape == expected.shape
    assert vectors.shape == their_vectors.shape
    assert values.dtype == expected.dtype
    eps = torch.finfo(x.dtype).eps
    n = x.shape[-1]
    for a, w, v, only, right, theirs in zip(
        *(y.reshape(-1, *y.shape[y.dim() - d :]) for y, d in ((x, 2), (values, 1), (vectors, 2), (alone, 1), (expected, 1), (their_vectors, 2))),
        strict=True,
    ):  # fmt: skip
        size = a.abs().max().item()
        scale = size or 1.0
        residual = (a / scale).to(v.dtype) @ v - v * (w / scale)
        assert residual.abs().max() <= _BOUND * n * eps, (a, w)
        assert (v.norm(dim=0) - 1).abs().max() <= 8 * eps
        largest = v.abs() >= (1 - 8 * eps) * v.abs().amax(0)
        assert torch.all((largest & (v.imag == 0) & (v.real > 0)).any(0))
        worst = condition if condition is not None else linalg.cond(theirs.to(torch.complex128)).item()
        for entry in (w, only):
            assert distance(entry / scale, right / scale) <= _BOUND * n * eps * worst, (entry, right)
        if not a.is_complex():
            assert torch.equal(w.imag.sort()[0], (-w.imag).sort()[0])
            pair = w.imag > 0
            after = torch.cat([pair.new_zeros(1), pair[:-1]])
            assert torch.equal(w[after], w[pair].conj())
            assert torch.equal(v[:, after], v[:, pair].conj())
            assert not v[:, w.imag == 0].imag.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 3, 5, 5), (3, 1, 1), (16, 16)], ids=str)
def test_of_static_sizes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for seed in range(2):
        compare(program_of(shape, dtype), random(*shape, dtype=dtype, seed=seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("opset", [13, None, 26])
def test_of_dynamic_sizes(dtype: torch.dtype, opset: int | None) -> None:
    program = program_of(None, dtype, opset)
    for shape in ((2, 4, 4), (3, 7, 7), (5, 2, 2), (1, 12, 12), (4, 1, 1)):
        compare(program, random(*shape, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_no_elements(dtype: torch.dtype) -> None:
    for shape in ((0, 3, 3), (2, 0, 0), (0, 0)):
        check(linalg.eigvals, torch.zeros(shape, dtype=dtype))
        check(linalg.eig, torch.zeros(shape, dtype=dtype))
    dynamic = [dict.fromkeys(range(3), AUTO)]
    others = [(torch.zeros(shape, dtype=dtype),) for shape in ((0, 3, 3), (2, 0, 0))]
    check(
        lambda x: linalg.eigvals(x).sum(-1),
        random(2, 4, 4, dtype=dtype),
        others=others,
        dynamic=dynamic,
        **looser("eigenvalues"),
    )


def hard() -> dict[str, Tensor]:
    """Matrices on which QR steps stall, or that have no basis of eigenvectors, or elements of very different size."""
    n = 6
    random_ = random(n, n)
    turn = torch.tensor([[0.0, 1], [-1, 0]])
    roots = torch.tensor([21.0, -175, 735, -1624, 1764, -720])
    return {
        "identity": torch.eye(n),
        "zero": torch.zeros(n, n),
        "ones": torch.ones(n, n),
        "jordan": torch.diag(torch.ones(n - 1), 1) + 2 * torch.eye(n),
        "jordan_lower": torch.diag(torch.ones(n - 1), -1) + 2 * torch.eye(n),
        "nilpotent": torch.diag(torch.ones(n - 2), 2),
        "cycle": torch.eye(n).roll(1, 0),
        "two_cycles": torch.eye(n).roll(2, 0),
        "rank_two": random_[:, :2] @ random_[:2],
        "lower": torch.tril(torch.ones(n, n)),
        "permuted_triangle": torch.triu(random_)[torch.tensor([2, 0, 4, 5, 1, 3])][:, torch.tensor([2, 0, 4, 5, 1, 3])],
        "antisymmetric": random_ - random_.T,
        "symmetric": random_ + random_.T,
        "repeated_pairs": torch.block_diag(turn, turn, turn),
        "defective_pairs": torch.block_diag(turn, turn, turn) + torch.diag(torch.tensor([1.0, 1, 0, 0]), 2),
        "companion": torch.cat([roots[None], torch.eye(n)[:-1]]),
        "graded": torch.diag(torch.tensor([1e8, 1, 1e-8, 5, 2, 2])),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_hard_matrices(dtype: torch.dtype) -> None:
    for name, a in hard().items():
        x = a.to(dtype) * (0.6 + 0.8j) if dtype.is_complex else a.to(dtype)
        # For defective matrices, and for matrices near them, the residual alone shows that they are right.
        exact = name in ("jordan", "jordan_lower", "nilpotent", "lower", "permuted_triangle")
        condition = 1.0 if exact else math.inf if name in ("defective_pairs", "rank_two") else None
        compare(program_of((6, 6), dtype), x, condition)
    tiny = 1e-30 if dtype in (torch.float32, torch.complex64) else 1e-250
    for scale in (tiny, 1 / tiny):
        compare(program_of((6, 6), dtype), random(6, 6, dtype=dtype, seed=3) * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_elements_beside_large_ones_count(dtype: torch.dtype) -> None:
    # Without scaling the eigenvalues near 1 are lost beside 1e9.
    d = torch.tensor([1.0, 1e4, 1e8, 1e-4]).double()
    core = random(4, 4, seed=5)
    x = (core * d[:, None] / d).to(dtype)
    values = results(program_of((4, 4), dtype), x)[2]
    assert distance(values, linalg.eigvals(core)) <= 1e-4 if dtype in (torch.float32, torch.complex64) else 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_infinite_numbers_are_nan(dtype: torch.dtype) -> None:
    # torch raises an error. The other matrices of the batch are not affected.
    for bad in (math.nan, math.inf, -math.inf):
        x = random(2, 4, 4, dtype=dtype)
        x[0, 1, 2] = bad
        for result in results(program_of(None, dtype), x):
            assert torch.isnan(result[0]).all()
            assert torch.isfinite(result[1]).all()


def test_in_a_model() -> None:
    def spectral_radius(x: Tensor) -> Any:
        values = linalg.eigvals(x)
        return values.abs().amax(-1), values.real.sort()[0], values.prod(-1).real

    others = [(random(3, 6, 6, seed=2),), (random(1, 2, 2, seed=3),)]
    dynamic = [{0: AUTO}]
    check(spectral_radius, random(2, 6, 6), others=others[:1], dynamic=dynamic, rtol=1e-9, atol=1e-9)
    a = random(5, 5)
    check(lambda x: linalg.eigvals(x).imag.sort()[0], a, others=[(a.T.contiguous(),), (a - a.T,)], rtol=1e-9, atol=1e-9)
    check(torch.ops.aten._linalg_eigvals.default, torch.diag(torch.tensor([3.0, 1, 2])))


def test_the_graph_does_not_grow_with_the_matrix() -> None:
    def count(n: int) -> int:
        program = onnxplug.to_onnx(Call(linalg.eig), (random(n, n),))
        return sum(1 for _ in program.model.graph.all_nodes())

    assert count(5) == count(20) < 800
