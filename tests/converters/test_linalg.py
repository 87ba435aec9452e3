"""Dense linear algebra: each operator on stacks of matrices, empty ones, sizes of 1, and values that break algorithms."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import onnxplug
from tests.support.check import Call, check
from tests.support.releases import IS_29
from tests.support.sampling import rotated

linalg = torch.linalg
AUTO = torch.export.Dim.AUTO


def matrices(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Random matrices far from singular."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return (x + 2 * torch.eye(*shape[-2:], dtype=torch.float64).flip(-1)).to(dtype)


def definite(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = matrices(*shape).double()
    return (x @ x.mT + torch.eye(shape[-2], dtype=torch.float64)).to(dtype)


#: Operators of one square matrix whose results are unique.
SQUARE: dict[str, Callable[[Tensor], Any]] = {
    "inv": linalg.inv,
    "inv_ex": linalg.inv_ex,
    "det": linalg.det,
    "slogdet": linalg.slogdet,
    "logdet": torch.logdet,
    "solve_itself": lambda a: linalg.solve(a, a @ a),
    "solve_right": lambda a: linalg.solve(a, a @ a, left=False),
    "lu": linalg.lu,
    "lu_factor_ex": linalg.lu_factor_ex,
    "lu_solve": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a),
    "lu_solve_adjoint": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a, adjoint=True),
    "lu_solve_right": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a, left=False),
    "lu_solve_right_adjoint": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a, left=False, adjoint=True),
    "lu_unpack": lambda a: torch.lu_unpack(*linalg.lu_factor(a)),
    "matrix_exp": linalg.matrix_exp,
    "eigvalsh": linalg.eigvalsh,
    "eigvalsh_upper": lambda a: linalg.eigvalsh(a, UPLO="U"),
    "pinv_hermitian": lambda a: linalg.pinv(a + a.mT, hermitian=True),
    "cond": linalg.cond,
}
#: Operators of one matrix of any shape.
ANY: dict[str, Callable[[Tensor], Any]] = {
    "qr": linalg.qr,
    "qr_complete": lambda a: linalg.qr(a, mode="complete"),
    "qr_r": lambda a: linalg.qr(a, mode="r")[1],
    "svdvals": linalg.svdvals,
    "pinv": linalg.pinv,
    "matrix_rank": linalg.matrix_rank,
    "lu_rectangular": linalg.lu,
    "nuc": lambda a: linalg.matrix_norm(a, "nuc"),
    "spectral": lambda a: linalg.matrix_norm(a, 2, keepdim=True),
    "frobenius": linalg.matrix_norm,
}
POSITIVE: dict[str, Callable[[Tensor], Any]] = {
    "cholesky": linalg.cholesky,
    "cholesky_upper": lambda a: linalg.cholesky(a, upper=True),
    "cholesky_ex": linalg.cholesky_ex,
    "cholesky_inverse": lambda a: torch.cholesky_inverse(linalg.cholesky(a)),
    "cholesky_solve": lambda a: torch.cholesky_solve(a, linalg.cholesky(a)),
    "cholesky_solve_upper": lambda a: torch.cholesky_solve(a, linalg.cholesky(a, upper=True), upper=True),
}


def fixed(shape: tuple[int, ...]) -> dict[int, Any]:
    """The dynamic axes of an example."""
    return dict.fromkeys(range(len(shape)), AUTO)


@pytest.mark.parametrize(("name", "dtype"), rotated(SQUARE, [torch.float32, torch.float64], every=2))
def test_square(name: str, dtype: torch.dtype) -> None:
    check(SQUARE[name], matrices(4, 4, dtype=dtype))
    check(SQUARE[name], matrices(2, 3, 5, 5, dtype=dtype))
    check(SQUARE[name], matrices(2, 1, 1, dtype=dtype))


@pytest.mark.parametrize(("name", "opset"), rotated(SQUARE, [13, None, 26], every=3))
def test_square_of_dynamic_size(name: str, opset: int | None) -> None:
    others = [(matrices(*shape),) for shape in ((3, 6, 6), (5, 2, 2))]
    check(SQUARE[name], matrices(2, 4, 4), others=others, dynamic=[fixed((2, 4, 4))], opset=opset)


@pytest.mark.parametrize("name", ["inv", "det", "slogdet", "lu_factor_ex", "matrix_exp", "eigvalsh", "solve_itself"])
def test_square_empty(name: str) -> None:
    check(SQUARE[name], torch.zeros(0, 3, 3))
    check(SQUARE[name], torch.zeros(2, 0, 0))
    check(SQUARE[name], torch.zeros(0, 0))
    check(SQUARE[name], matrices(2, 4, 4), others=[(torch.zeros(0, 3, 3).double(),)], dynamic=[fixed((2, 4, 4))])


@pytest.mark.parametrize(
    ("name", "shape"),
    rotated(ANY, [(5, 3), (3, 5), (4, 4), (2, 4, 3), (2, 1, 3), (1, 1), (0, 3, 2), (2, 3, 0)], every=2),
)
def test_any_shape(name: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        check(ANY[name], matrices(*shape, dtype=dtype))


# torch.export itself takes the batch of a spectral norm for static.
@pytest.mark.parametrize("name", [name for name in ANY if name != "spectral"])
def test_any_shape_dynamic(name: str) -> None:
    others = [(matrices(*shape),) for shape in ((3, 4, 6), (3, 7, 2), (2, 3, 3))]
    check(ANY[name], matrices(2, 5, 3), others=others, dynamic=[fixed((2, 5, 3))], opset=13)


@pytest.mark.parametrize("name", POSITIVE)
def test_positive(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        check(POSITIVE[name], definite(4, 4, dtype=dtype))
        check(POSITIVE[name], definite(2, 3, 3, dtype=dtype))
    check(POSITIVE[name], definite(2, 4, 4), others=[(definite(3, 7, 7),), (definite(5, 1, 1),)], dynamic=True)


#: torch 2.13 has neither linalg.polar nor linalg.matrix_sqrth; torch 2.15 does.
newer = pytest.mark.skipif(not hasattr(linalg, "polar"), reason="torch 2.13 has no linalg.polar and no matrix_sqrth")


@newer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_matrix_sqrth(dtype: torch.dtype) -> None:
    def root(a: Tensor) -> Tensor:
        return linalg.matrix_sqrth(a)

    dynamic = [fixed((2, 4, 4))]
    for shape in ((4, 4), (2, 3, 5, 5), (2, 1, 1)):
        check(root, definite(*shape, dtype=dtype))
    for shape in ((0, 3, 3), (2, 0, 0)):
        check(root, torch.zeros(shape, dtype=dtype))
    for opset in (13, None):
        others = [(definite(*shape, dtype=dtype),) for shape in ((3, 7, 7), (5, 2, 2))]
        check(root, definite(2, 4, 4, dtype=dtype), others=others, dynamic=dynamic, opset=opset)
    # The upper triangle is not read, and a negative eigenvalue counts as 0.
    for a in ([[2.0, math.nan], [1.0, 3.0]], [[2.0, 1.0], [1.0, -1.0]], [[-4.0, 0.0], [0.0, -9.0]]):
        check(root, torch.tensor(a, dtype=dtype))
    program = onnxplug.to_onnx(Call(root), (torch.eye(2, dtype=dtype),))
    assert torch.isnan(program(torch.tensor([[math.nan, 0.0], [0.0, 1.0]], dtype=dtype))[0]).all()


@newer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_polar(dtype: torch.dtype) -> None:
    def polar(a: Tensor) -> Any:
        return linalg.polar(a)

    for shape in ((4, 4), (5, 3), (2, 3, 4, 2), (2, 1, 1), (3, 1), (3, 0), (0, 3, 2)):
        check(polar, matrices(*shape, dtype=dtype))
    for opset in (13, None):
        others = [(matrices(*shape, dtype=dtype),) for shape in ((3, 7, 2), (2, 3, 3))]
        check(polar, matrices(2, 5, 3, dtype=dtype), others=others, dynamic=[fixed((2, 5, 3))], opset=opset)
    # U has orthonormal columns, and U H is A, even if A is singular and U is not unique; H is exactly symmetric.
    program = onnxplug.to_onnx(Call(polar), (torch.zeros(4, 3, dtype=dtype),))
    for a in (torch.zeros(4, 3), torch.ones(4, 3), torch.arange(12.0).view(4, 3)):
        u, h = program(a.to(dtype))
        torch.testing.assert_close(u.mT @ u, torch.eye(3, dtype=dtype))
        torch.testing.assert_close(u @ h, a.to(dtype))
        assert torch.equal(h, h.mT)


def test_cholesky_reads_one_triangle() -> None:
    a = definite(3, 3)
    a[0, 2] = math.nan
    check(linalg.cholesky, a)
    check(lambda x: linalg.cholesky(x, upper=True), a.mT.contiguous())


def test_cholesky_says_where_it_fails() -> None:
    a = torch.stack([definite(3, 3), -definite(3, 3), torch.diag(torch.tensor([4.0, 9.0, 0.0]).double())])
    check(lambda x: linalg.cholesky_ex(x)[1], a)
    a[0, 1, 1] = math.nan
    check(lambda x: linalg.cholesky_ex(x)[1], a)
    program = onnxplug.to_onnx(Call(lambda x: linalg.cholesky_ex(x)[0]), (a,))
    assert torch.isnan(program(a)[0][..., -1, -1]).all()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_solve_triangular(upper: bool, left: bool, unit: bool) -> None:
    # The elements of the other triangle, and of a unit diagonal, are not read.
    a = matrices(2, 3, 3) + 3 * torch.eye(3)
    a = torch.where(torch.ones(3, 3).triu(1).bool() != upper, a, math.nan) if upper else a
    a = a.tril() if not upper else torch.where(torch.ones(3, 3).tril(-1).bool(), math.nan, a.nan_to_num(1.0))
    check(lambda x, y: linalg.solve_triangular(x, y, upper=upper, left=left, unitriangular=unit), a, matrices(2, 3, 3))


def test_factors_of_a_linear_system() -> None:
    """torch 2.9 gives the factors of the transpose where the matrix is contiguous."""
    a, b = torch.randn(2, 3, 3) + 4 * torch.eye(3), torch.randn(2, 3, 2)
    with pytest.raises(onnxplug.OnnxplugError, match="strides of the matrix") if IS_29 else contextlib.nullcontext():
        check(lambda a, b: torch.ops.aten._linalg_solve_ex(a, b)[:3], a, b, others=[(a.flip(1), b + 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["_linalg_det", "_linalg_slogdet"])
@pytest.mark.parametrize("turned", [False, True])
def test_factors_of_a_determinant(name: str, turned: bool, dtype: torch.dtype) -> None:
    """They are those of the transpose where the matrix is contiguous."""
    operator = getattr(torch.ops.aten, name)
    a = torch.randn(2, 3, 3, dtype=dtype) + 4 * torch.eye(3, dtype=dtype)
    others = [(a.flip(1) * 2,), (torch.zeros(1, 1, 1, dtype=dtype),), (a[:0],)]
    check(lambda a: operator(a.mT if turned else a), a, others=others, dynamic=({0: "b", 1: "n", 2: "n"},))


def test_solve_broadcasts() -> None:
    a, b = matrices(3, 3), matrices(4, 2, 3, 5)
    check(linalg.solve, a, b)
    check(linalg.solve, matrices(2, 3, 3), matrices(4, 1, 3, 2))
    check(linalg.solve, matrices(2, 3, 3), torch.ones(2, 3).double())
    check(linalg.solve, matrices(2, 3, 3), torch.ones(3).double())
    check(lambda x, y: linalg.solve(x, y, left=False), matrices(3, 3), matrices(2, 5, 3))
    check(
        lambda x, y: linalg.solve_triangular(x, y, upper=True),
        matrices(2, 1, 3, 3) + 4 * torch.eye(3),
        matrices(4, 3, 2),
    )


def test_ties_take_the_first_pivot() -> None:
    a = torch.tensor([[0.0, 1, 2], [-1, 1, 0], [1, 1, 5]])
    check(linalg.lu_factor_ex, a, others=[(a.flip(0),), (torch.ones(3, 3),), (torch.zeros(3, 3),)])


def test_singular() -> None:
    a = torch.tensor([[[1.0, 2], [2, 4]], [[0, 0], [0, 3]], [[0, 1], [1, 0]]])
    check(linalg.det, a.double())
    check(linalg.det, a)
    check(linalg.slogdet, a)
    check(linalg.lu_factor_ex, a)
    check(lambda x: linalg.inv_ex(x)[1], a)
    check(lambda x: linalg.solve_ex(x, x)[1], a)


@pytest.mark.parametrize("name", ["inv", "det", "slogdet", "lu_factor_ex", "matrix_exp"])
def test_nan(name: str) -> None:
    for row, column in ((0, 0), (0, 1), (1, 1), (2, 0)):
        a = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]], dtype=torch.float64)
        a[row, column] = math.nan
        check(SQUARE[name], a)


@pytest.mark.parametrize("order", ["fro", 1, -1, math.inf, -math.inf])
def test_norm_of_nan(order: Any) -> None:
    a = torch.tensor([[1.0, 2], [math.nan, 3]])
    for x in (a, a.mT.contiguous(), a.nan_to_num(math.inf)):
        check(lambda y: linalg.matrix_norm(y, order), x)
        check(lambda y: linalg.cond(y, order), x)


def test_qr_of_nan() -> None:
    # A NaN below the diagonal is not taken for the zero that needs no reflection.
    for row, column in ((1, 0), (2, 0), (0, 1), (1, 1), (2, 1)):
        a = torch.tensor([[1.0, 2, 5], [0, 3, 1], [0, 0, 2]])
        a[row, column] = math.nan
        check(lambda x: linalg.qr(x, mode="r")[1], a)


def test_spectral_of_nan_is_nan() -> None:
    # torch raises an error; the result must not be a number.
    a = matrices(2, 3, 3)
    a[0, 1, 1] = math.nan
    for function in (linalg.svd, linalg.eigh, lambda x: (linalg.pinv(x),)):
        program = onnxplug.to_onnx(Call(function), (matrices(2, 3, 3),))
        for result in program(a):
            assert torch.isnan(result[0]).all()
            assert torch.isfinite(result[1]).all()


def _from_svd(a: Tensor, complete: bool) -> tuple[Tensor, ...]:
    u, s, vh = linalg.svd(a, full_matrices=complete)
    k = s.shape[-1]
    return s, (u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :], u.mT @ u, vh @ vh.mT


def _from_eigh(a: Tensor) -> tuple[Tensor, ...]:
    values, vectors = linalg.eigh(a)
    return values, (vectors * values.unsqueeze(-2)) @ vectors.mT, vectors.mT @ vectors


def hard(dtype: torch.dtype) -> list[Tensor]:
    """Matrices on which spectral algorithms break: repeated, zero and tiny singular values, huge and tiny elements."""
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(6, 2, generator=generator, dtype=torch.float64) @ torch.randn(2, 6, generator=generator).double()
    huge = 1e30 if dtype == torch.float32 else 1e250
    matrices = [
        torch.eye(6),
        torch.zeros(6, 6),
        torch.ones(6, 6),
        low,
        low @ low.mT,
        torch.diag(torch.tensor([3.0, 3, 3, -3, 1e-12, 0])),
        torch.diag(torch.tensor([1e8, 1, 1e-8, 5, 2, 2])),
        torch.tril(torch.ones(6, 6)),
    ]
    return [x.to(dtype) for x in matrices] + [low.to(dtype) * huge, low.to(dtype) / huge]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_spectral_of_hard_matrices(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps

    @cache  # a program holds for every matrix of its shape
    def of_svd(shape: torch.Size, complete: bool) -> onnxplug.OnnxProgram:
        return onnxplug.to_onnx(Call(lambda y: _from_svd(y, complete)), (torch.ones(shape, dtype=dtype),))

    of_eigh = onnxplug.to_onnx(Call(_from_eigh), (torch.ones(6, 6, dtype=dtype),))
    for a in hard(dtype):
        symmetric = torch.tril(a) + torch.tril(a, -1).mT
        size = max(a.abs().max().item(), torch.finfo(dtype).tiny)
        for x in (a, a[:, :4].contiguous(), a[:3].contiguous()):
            for complete in (False, True):
                s, product, *units = of_svd(x.shape, complete)(x)
                assert (product - x).abs().max() <= 60 * eps * size
                assert (s - linalg.svdvals(x)).abs().max() <= 60 * eps * size
                for unit in units:
                    assert (unit - torch.eye(len(unit), dtype=dtype)).abs().max() <= 60 * eps
        values, product, unit = of_eigh(a)
        assert (product - symmetric).abs().max() <= 60 * eps * size
        assert (values - linalg.eigvalsh(a)).abs().max() <= 60 * eps * size
        assert (unit - torch.eye(6, dtype=dtype)).abs().max() <= 60 * eps


@pytest.mark.parametrize("n", [2, 3, 17, 40])
def test_spectral_of_sizes(n: int) -> None:
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    check(lambda x: _from_svd(x, False), a, rtol=1e-11, atol=1e-11)
    check(_from_eigh, a, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_spectral_accuracy_does_not_fall_with_size(dtype: torch.dtype) -> None:
    # Thousands of rotations: their rounding errors must not add up.
    a = torch.randn(96, 96, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    eps = torch.finfo(dtype).eps
    s, product, *units = onnxplug.to_onnx(Call(lambda x: _from_svd(x, False)), (a,))(a)
    assert (s.double() - linalg.svdvals(a.double())).abs().max() <= 8 * eps * s[0]
    assert (product - a).abs().max() <= 8 * eps * s[0]
    symmetric = torch.tril(a) + torch.tril(a, -1).mT
    values, again, unit = onnxplug.to_onnx(Call(_from_eigh), (a,))(a)
    size = values.abs().max()
    # In double the reference is no better: LAPACK's own drivers differ by 14 eps here.
    assert (values.double() - linalg.eigvalsh(a.double())).abs().max() <= (
        8 if dtype == torch.float32 else 32
    ) * eps * size
    assert (again - symmetric).abs().max() <= 8 * eps * size
    for x in (*units, unit):
        assert (x - torch.eye(96, dtype=dtype)).abs().max() <= 16 * eps


def test_spectral_of_dynamic_size() -> None:
    others = [(matrices(3, 3, 6),), (matrices(1, 7, 4),), (matrices(3, 2, 2),)]
    for complete in (False, True):
        check(lambda x, c=complete: _from_svd(x, c), matrices(2, 5, 3), others=others, dynamic=[fixed((2, 5, 3))])
    check(_from_eigh, matrices(2, 4, 4), others=[(matrices(3, 7, 7),), (matrices(1, 2, 2),)], dynamic=True)


def test_reflections() -> None:
    a, c = matrices(2, 5, 3), matrices(2, 5, 4)
    packed, tau = torch.geqrf(a)
    check(torch.geqrf, a, others=[(torch.zeros(2, 5, 3).double(),)])
    check(linalg.householder_product, packed, tau)
    for transposed in (False, True):
        check(lambda p, t, x, f=transposed: torch.ormqr(p, t, x, transpose=f), packed, tau, c)
        check(
            lambda p, t, x, f=transposed: torch.ormqr(p, t, x, left=False, transpose=f), packed, tau, c.mT.contiguous()
        )


def test_qr_signs_and_sizes() -> None:
    a = torch.tensor([[0.0, 1, 2], [0, -2, 1], [0, 0, -3]])
    check(linalg.qr, a, others=[(-a,), (a.mT.contiguous(),), (torch.zeros(3, 3),)])
    for scale in (1e30, 1e-30):

        def scaled(x: Tensor, size: float = scale) -> tuple[Tensor, Tensor]:
            q, r = linalg.qr(x)
            return q, r / size

        check(scaled, a.mT.contiguous() * scale)


def test_matrix_exp_of_norms() -> None:
    for scale in (0.0, 1e-6, 0.1, 1.0, 10.0, 100.0):
        a = matrices(3, 4, 4) * scale * torch.tensor([1.0, 0.01, -1]).reshape(3, 1, 1)
        check(linalg.matrix_exp, a, rtol=1e-11 * max(scale, 1), atol=1e-12)
    check(linalg.matrix_exp, torch.tensor([[0.0, 1e6], [0, 0]]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matrix_exp_of_narrow_types(dtype: torch.dtype) -> None:
    """Every element is right to rounding, also small ones beside large ones; torch's own float kernel is 3e-4 off."""
    a = (
        torch.randn(20, 6, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 20).reshape(-1, 1, 1)
    ).to(dtype)
    program = onnxplug.to_onnx(Call(linalg.matrix_exp), (a,))
    for x in (a, a.mT.contiguous() * 0.7):
        expected = torch.linalg.matrix_exp(x.double()).to(dtype)
        torch.testing.assert_close(program(x)[0], expected, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_matrix_exp_of_complex_matrices(dtype: torch.dtype) -> None:
    """Every element is right to rounding of the largest; torch's own complex64 kernel is less exact than ours."""
    example = torch.randn(2, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    call = Call(linalg.matrix_exp)
    program = onnxplug.to_onnx(call, (example,), dynamic_shapes=((fixed((2, 4, 4)),),))
    turn = torch.tensor([[[0, 1j], [1j, 0]]], dtype=dtype) * (math.pi / 2)
    others = torch.randn(3, 6, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for x in (example, others, others * 1e-3, others * 5, turn, torch.zeros(1, 3, 3, dtype=dtype)):
        expected = linalg.matrix_exp(x.to(torch.complex128))
        result = torch.view_as_complex(program(x)[0]).to(torch.complex128)
        top = expected.abs().amax((-2, -1), keepdim=True)
        assert result.shape == expected.shape
        assert ((result - expected).abs() / top).max() <= (1e-6 if dtype == torch.complex64 else 1e-12)
    for shape in ((0, 3, 3), (2, 0, 0)):
        check(linalg.matrix_exp, torch.zeros(shape, dtype=dtype))
    a = torch.ones(2, 2, dtype=dtype)
    a[0, 1] = math.nan
    assert torch.isnan(onnxplug.to_onnx(call, (a,))(a)[0]).any()


NORMS = ["fro", "nuc", 2, -2, 1, -1, math.inf, -math.inf]


@pytest.mark.parametrize("order", NORMS)
def test_norms(order: Any) -> None:
    a = matrices(2, 3, 4)
    check(lambda x: linalg.matrix_norm(x, order), a, others=[(-a,), (a * 1e6,), (torch.zeros(2, 3, 4).double(),)])
    check(lambda x: linalg.matrix_norm(x, order, dim=(2, 0), keepdim=True), a)
    check(lambda x: linalg.norm(x, order, dim=(0, 1)), a)
    # torch.export itself takes the sizes for static where it sums over one axis and then the other.
    dynamic = [fixed((3, 4))] if order in ("fro", "nuc", 2, -2) else None
    check(lambda x: linalg.norm(x, order), a[0], others=[(matrices(5, 2),)] if dynamic else [], dynamic=dynamic)
    check(lambda x: linalg.cond(x, order), matrices(2, 3, 3), others=[(-3 * matrices(2, 3, 3, seed=1),)])


@pytest.mark.parametrize("order", ["nuc", 2])
def test_norm_exported_from_an_empty_matrix(order: Any) -> None:
    # torch asks whether the matrix is empty for the spectral norm alone: Dim.AUTO axes are static then.
    others = [(matrices(4, 4),), (matrices(1, 1),)] if order == "nuc" else []
    check(lambda x: linalg.matrix_norm(x, order), torch.zeros(0, 0).double(), others=others, dynamic=[fixed((0, 0))])
    check(
        lambda x: linalg.matrix_norm(x, order),
        matrices(4, 4),
        others=[(torch.zeros(0, 0).double(),)],
        dynamic=[fixed((4, 4))],
    )


@pytest.mark.parametrize("order", ["fro", "nuc", 1])
def test_cond_of_dynamic_size(order: Any) -> None:
    """torch's own fake kernel asks for a plain number of elements where the norm has a name."""
    others = [(matrices(*shape),) for shape in ((1, 5, 5), (3, 1, 1), (2, 0, 0))]
    check(lambda x: linalg.cond(x, order), matrices(2, 3, 3), others=others, dynamic=True)


def test_cond_of_singular() -> None:
    a = torch.tensor([[[1.0, 2], [2, 4]], [[0, 0], [0, 0]], [[2, 0], [0, 1]]])
    for order in ("fro", 1, math.inf):
        check(lambda x, p=order: linalg.cond(x, p), a)
    check(linalg.cond, torch.zeros(2, 0, 0))


@pytest.mark.long
def test_pinv_tolerances() -> None:
    a = torch.diag(torch.tensor([4.0, 1.0, 1e-3, 0.0])).double()
    for options in ({}, {"rtol": 0.01}, {"atol": 0.1}, {"atol": 0.0}, {"atol": 0.1, "rtol": 0.5}):
        check(lambda x, o=options: linalg.pinv(x, **o), a, others=[(-a,)])
        check(lambda x, o=options: linalg.pinv(x, hermitian=True, **o), a, others=[(-a,)])
        check(lambda x, o=options: linalg.matrix_rank(x, **o), a, others=[(-a,)])
    check(lambda x, t: linalg.pinv(x, rtol=t), torch.stack([a, a]), torch.tensor([1e-6, 0.5]).double())


def test_vander() -> None:
    x = torch.tensor([[2.0, -3.0, 0.0], [math.inf, math.nan, 1e20]])
    check(linalg.vander, x)
    check(lambda y: linalg.vander(y, N=5), x)
    check(lambda y: linalg.vander(y, N=5), torch.tensor([3, -7]))


def test_loops_do_not_grow() -> None:
    def count(n: int) -> int:
        program = onnxplug.to_onnx(Call(linalg.inv), (matrices(n, n),))
        return sum(1 for node in program.model.graph.all_nodes())

    assert count(3) == count(20) < 100
