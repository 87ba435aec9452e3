"""Sums of millions of floats: ONNX Runtime adds them one after another, and beyond a size onnxplug in steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from tests.support.check import Call
from tests.support.tolerances import LOOSER

Function = Callable[[torch.Tensor], Any]
MILLION = 1_000_000
#: Weights and biases of norms.
W = torch.tensor([2.0, -0.5])

#: Functions whose plain form is wrong by 1e-4 to 7 times the result, and shapes of eight million numbers near 100.
LONG: dict[str, tuple[Function, tuple[int, ...]]] = {
    "mean": (lambda x: (x.mean(0), x.mean(0, True)), (4 * MILLION, 2)),
    "sum": (lambda x: x.sum((0, 2), keepdim=True), (2, 1, 4 * MILLION)),
    "everything": (lambda x: (x.mean(), x.sum()), (8, MILLION)),
    "prime": (lambda x: (x.mean(0), x.var(0)), (3_999_971, 2)),
    "var": (lambda x: torch.var_mean(x, 0), (4 * MILLION, 2)),
    "std": (lambda x: x.std(), (8 * MILLION,)),
    "many axes": (lambda x: x.std((0, 2, 3, 4), keepdim=True), (4, 2, 100, 100, 100)),
    "instance norm": (lambda x: F.instance_norm(x, weight=W.to(x), bias=W.to(x)), (1, 2, 2000, 2000)),
    "group norm": (lambda x: F.group_norm(x, 1, W.to(x), W.to(x)), (1, 2, 2000, 2000)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, W.to(x), W.to(x), training=True), (4, 2, MILLION)),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), (1, 8, MILLION)),
    "rms norm": (lambda x: F.rms_norm(x, x.shape[1:]), (1, 8, MILLION)),
    "loss": (lambda x: (F.mse_loss(x, x.flip(0) + 9), F.l1_loss(x, x.flip(0) + 9)), (2, 4 * MILLION)),
    "dot": (lambda x: torch.dot(x, x + 1), (8 * MILLION,)),
    "cumsum": (lambda x: (x.cumsum(2), x.cumsum(0)), (3, 1, 3_999_971)),
    "products": (lambda x: (x @ x.T, x[:1] @ x[1], x[0] @ x.T, x.T[:, :1].T @ x.T), (2, 4 * MILLION)),
    "batches": (lambda x: (x @ x.mT, x[:, :1] @ x[1].mT, x[1, 0].inner(x), x @ x[0, 1]), (2, 3, MILLION)),
    "prime product": (lambda x: (x.T @ x, torch.mv(x.T, x[:, 0])), (3_999_971, 2)),
    "with bias": (
        lambda x: (
            torch.addmm(x[:, :1], x, x.T, alpha=0.5),
            F.linear(x[:1], x, x[:, 0]),
            torch.addmv(x[:, 0], x, x[1]),
        ),
        (2, 4 * MILLION),
    ),
    "more axes": (lambda x: (torch.tensordot(x, x, 2), torch.tensordot(x, x, ([1], [1]))[:2]), (2000, 500)),
    "complex": (lambda x: (torch.complex(x, x + 1)[0] @ torch.complex(x, 3 * x)[1]).imag, (2, 4 * MILLION)),
    "einsum": (
        lambda x: (
            torch.einsum("bi,bi->", x, x),
            torch.einsum("bi,ci->bc", x, x),
            torch.einsum("bi,i,ci", x, x[0] / 99, x),
        ),
        (2, 4 * MILLION),
    ),
    "einsum of one": (lambda x: (torch.einsum("ij->j", x), torch.einsum("ij->", x)), (4 * MILLION, 2)),
    "einsum of many axes": (
        lambda x: (
            torch.einsum("ijkl,ijkl->", x, x),
            torch.einsum("ijkl,ijml->km", x, x),
            torch.einsum("ijkl,j->l", x, x[0, :, 0, 0]),
        ),
        (100, 101, 2, 200),
    ),
    "einsum of sums": (lambda x: torch.einsum("ai,bj->ab", x, x), (2, MILLION)),
    "einsum of primes": (lambda x: torch.einsum("ia,ib->ab", x, x), (999_983, 2)),
    "logcumsumexp": (lambda x: (x.logcumsumexp(0), x.logcumsumexp(1)), (600_011, 2)),
    "global pool": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 2, 2000, 2000)),
}


def inputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Numbers near 100, and near -30 with other deviations."""
    generator = torch.Generator().manual_seed(3)
    near = torch.randn(shape, generator=generator)
    return [near + 100, near * 5 - 30]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.long
def test_millions(name: str) -> None:
    function, shape = LONG[name]
    first, second = inputs(shape)
    program = onnxplug.to_onnx(Call(function), (first,))
    for x in (first, second):
        expected = function(x.double())
        results = expected if isinstance(expected, tuple) else (expected,)
        for got, wanted in zip(program(x), results, strict=True):
            # torch's own error is 1e-7 to 1e-5.
            assert (got.double() - wanted).abs().max() < 1e-4 * wanted.abs().mean().clamp_min(0.3)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values(special: float) -> None:
    x = torch.ones(2, 600_001)
    x[1, 77] = special

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one = torch.ones_like(x)
        products = x @ one.T, x[1] @ one[0], torch.einsum("bi,ci->b", x, one), torch.einsum("bi->", x)
        return x.mean(1), x.sum(1), x.sum(), x.var(1), x.cumsum(1), x.logcumsumexp(1), *products

    program = onnxplug.to_onnx(model, (torch.zeros_like(x),))
    for got, wanted in zip(program(x), model(x), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


def operators(function: Function, *shape: int, **options: Any) -> Counter[str]:
    return Counter(node.op_type for node in onnxplug.to_onnx(function, (torch.rand(shape),), **options).model.graph)


def test_ordinary_sizes_and_portable_models_have_the_plain_form() -> None:
    assert operators(lambda x: x.mean((2, 3)), 1, 3, 512, 512) == {"ReduceMean": 1}
    assert operators(F.instance_norm, 1, 3, 512, 512) == {"InstanceNormalization": 1}
    assert operators(lambda x: x.mean(1), 3, MILLION, target=None) == {"ReduceMean": 1}
    assert operators(F.instance_norm, 1, 1, MILLION, target=None) == {"InstanceNormalization": 1}
    assert operators(lambda x: x.mean(1), 3, MILLION)["ReduceSum"] == 2
    assert operators(lambda x: torch.einsum("ij,kj->ik", x, x), 3, 4096) == {"MatMul": 1, "Transpose": 1}
    assert operators(lambda x: torch.einsum("ij,ij->i", x, x), 3, 4096) == {"Einsum": 1}
    assert operators(lambda x: torch.einsum("ij,ij->i", x, x), 3, MILLION, target=None) == {"Einsum": 1}
    assert operators(lambda x: x @ x[0], 3, MILLION, target=None)["MatMul"] == 1
    # The products of the parts would be larger than the operands.
    wide = operators(lambda x: x.expand(-1, 4096).T @ x.expand(-1, 4096), MILLION, 1)
    assert "ReduceSum" not in wide
    assert wide["MatMul"] == 1


@pytest.mark.parametrize("size", [1, 5, 1024, 1025, 2 * 1031])
def test_logcumsumexp_in_rows(size: int) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.logcumsumexp(1)

    static = onnxplug.to_onnx(model, (torch.zeros(2, size),))
    dynamic = onnxplug.to_onnx(model, (torch.zeros(2, 3),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    torch.manual_seed(size)
    special = torch.randn(2, size) - 50
    special[0, size // 3] = -math.inf
    special[1, size // 2] = math.nan
    for x in (torch.randn(2, size) + 100, special, torch.full((2, size), -math.inf), special.nan_to_num(nan=math.inf)):
        for program in (static, dynamic):
            torch.testing.assert_close(program(x)[0], model(x), equal_nan=True)


def test_other_axes_may_be_dynamic() -> None:
    program = onnxplug.to_onnx(
        lambda x: (x.mean(1), x.std((1, 2))), (torch.rand(3, 600_000, 2),), dynamic_shapes=({0: "batch"},)
    )
    for batch in (1, 2):
        x = torch.randn(batch, 600_000, 2) + 50
        for got, wanted in zip(program(x), (x.double().mean(1), x.double().std((1, 2))), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=LOOSER["long sums"].rtol, atol=1e-6)


@pytest.mark.parametrize(
    "product",
    [lambda x: torch.einsum("bi,ci->bc", x, x), lambda x: x @ x.T, lambda x: x @ x[0]],
    ids=["einsum", "matrices", "vector"],
)
def test_products_along_dynamic_axes_are_summed_in_double_with_exact(product: Function) -> None:
    program = onnxplug.to_onnx(product, (torch.rand(2, 5),), dynamic_shapes=({1: "time"},), exact=True)
    for size in (4 * MILLION, 7):
        x = torch.randn(2, size) + 100
        torch.testing.assert_close(
            program(x)[0].double(), product(x.double()), rtol=LOOSER["core"].rtol, atol=LOOSER["core"].atol
        )


@pytest.mark.parametrize("norm", [F.instance_norm, lambda x: F.group_norm(x, 2), lambda x: x.var((0, 2))])
def test_dynamic_sizes_are_summed_in_double_with_exact(norm: Function) -> None:
    program = onnxplug.to_onnx(norm, (torch.rand(2, 2, 5),), dynamic_shapes=({0: "batch", 2: "time"},), exact=True)
    for shape in ((1, 2, 4 * MILLION), (3, 2, 7)):
        x = torch.randn(shape) + 100
        torch.testing.assert_close(
            program(x)[0].double(), norm(x.double()), rtol=LOOSER["core"].rtol, atol=LOOSER["core"].atol
        )
