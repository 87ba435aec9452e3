"""LDL factorisations: the same pivots and blocks as LAPACK's, so that the factors are compared as they are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import linalg

from tests.support.check import check

pytestmark = pytest.mark.filterwarnings("error:ONNX Runtime can't run")
AUTO = torch.export.Dim.AUTO
DTYPES = [torch.float64, torch.float32, torch.complex128, torch.complex64]


def matrices(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)


def indefinite(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on diagonals, which need blocks of two and exchanges; a definite matrix; upper triangles that differ."""
    a = matrices(5, n, n, seed=1, dtype=dtype)
    a[1].diagonal().zero_()
    a[2].diagonal()[::2] = 0
    a[3] = a[3] @ a[3].mT + torch.eye(n, dtype=dtype)
    return a


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_factors(n: int, dtype: torch.dtype, hermitian: bool) -> None:
    """A column of zeros is reported by ``info``. Of a Hermitian matrix the diagonal's imaginary part is not read."""
    a = indefinite(n, dtype)
    singular = a.clone()
    singular[::2, :, n // 2], singular[::2, n // 2] = 0, 0
    others = [(singular,), (a * 0,), (a.mT.contiguous() * 1e-8,)]
    check(lambda a: linalg.ldl_factor_ex(a, hermitian=hermitian), a, others=others)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_sizes_of_run_time(dtype: torch.dtype) -> None:
    others = [(indefinite(7, dtype)[:2],), (indefinite(2, dtype),), (torch.zeros(3, 1, 1).to(dtype),)]
    dynamic = [dict.fromkeys(range(3), AUTO)]
    for hermitian in (False, True):
        factor = functools.partial(linalg.ldl_factor_ex, hermitian=hermitian)
        check(lambda a, factor=factor: factor(a), indefinite(4, dtype), others=others, dynamic=dynamic)


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_solutions(batch: tuple[int, ...], dtype: torch.dtype, hermitian: bool) -> None:
    def solved(a: torch.Tensor, b: torch.Tensor) -> Any:
        packed, pivots = linalg.ldl_factor(a + (a.mH if hermitian else a.mT), hermitian=hermitian)
        return tuple(linalg.ldl_solve(packed, pivots, x, hermitian=hermitian) for x in (b, b[..., :1]))

    pairs = [
        (
            matrices(*batch, 6, 6, seed=s, dtype=dtype) - 3 * s * torch.eye(6).flip(0),
            matrices(*batch, 6, 3, seed=s + 5, dtype=dtype),
        )
        for s in (0, 1)
    ]
    a, b = pairs[1]
    pairs.append((a - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1)), b))  # all blocks of two
    single = dtype in (torch.float32, torch.complex64)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if single else {"rtol": 1e-9, "atol": 1e-9}
    args = [(x.to(dtype), y) for x, y in pairs]
    check(solved, *args[0], others=args[1:], **tolerance)


def test_right_sides_of_one_batch_for_many() -> None:
    packed, pivots = linalg.ldl_factor(indefinite(5, torch.float64))
    b = matrices(5, 2)
    check(lambda b: linalg.ldl_solve(packed, pivots, b.expand(5, 5, 2)), b, others=[(b * -2,)])


def test_one_solve_after_another_size() -> None:
    def solved(a: torch.Tensor, b: torch.Tensor) -> Any:
        return linalg.ldl_solve(*linalg.ldl_factor(a + a.mT), b)

    args = [(matrices(2, n, n, seed=n), matrices(2, n, 3, seed=n + 1)) for n in (4, 7, 2)]
    dynamic = ({1: AUTO, 2: AUTO}, {1: AUTO})
    check(solved, *args[0], others=args[1:], dynamic=dynamic, rtol=1e-8, atol=1e-8)
