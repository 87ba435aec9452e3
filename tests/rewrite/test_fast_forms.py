"""Forms that ONNX Runtime computes faster: each rewrite alone and all together, with the weights of the export and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.rewrites import norms, patterns
from tests.support.check import check
from tests.support.forms import AUTO, Form, check_form, stirred

FAST = {"transposed_weight", *(rewrite.name for rewrite in norms.REWRITES)}
REWRITES = {rewrite.name: rewrite for rewrite in (*patterns.REWRITES, *norms.REWRITES)}


class Tied(nn.Module):
    """A weight that is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x).chunk(3, -1), self.layer.weight.sum(0)


class Transposed(nn.Module):
    """A weight that is read transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.mT


class Norm(nn.Module):
    """A sum and its layer norm, the sum read again."""

    def __init__(self, again: bool, dropout: float = 0.0, alpha: float = 1.0) -> None:
        super().__init__()
        self.again, self.norm, self.layer = again, nn.LayerNorm(16, eps=1e-3), nn.Linear(16, 16)
        self.dropout, self.alpha = nn.Dropout(dropout) if dropout else nn.Identity(), alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.dropout(torch.add(x, self.layer(x), alpha=self.alpha))
        return self.norm(total) + total if self.again else self.norm(total)


class RootMeanSquare(nn.Module):
    """Llama's norm."""

    def __init__(self, weight_first: bool = True, axis: int = -1) -> None:
        super().__init__()
        self.weight, self.weight_first, self.axis = nn.Parameter(torch.empty(16)), weight_first, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(self.axis, keepdim=True) + 1e-3)
        return self.weight * normal if self.weight_first else normal * self.weight


FORMS: dict[str, Form] = {
    "weight read transposed": Form("transposed_weight", Transposed, {"Transpose": 0}),
    "weight read both ways": Form("transposed_weight", Tied, {"Transpose": 1}),
    "norm of a sum": Form("sum_before_norm", lambda: Norm(False), {"Sum": 1}, since=17),
    "norm of a residual sum": Form("sum_before_norm", lambda: Norm(True), {"Sum": 1, "Add": 1}, since=17),
    "norm of a sum that dropout leaves": Form(
        "sum_before_norm", lambda: Norm(False, 0.1), {"Sum": 1, "Add": 0}, since=17
    ),
    "norm of a scaled sum": Form("sum_before_norm", lambda: Norm(False, alpha=2.0), {"Sum": 1, "Add": 0}, since=17),
    "root mean square": Form(
        "root_mean_square_norm",
        RootMeanSquare,
        {"Pow": 1, "Div": 1, "Reciprocal": 0},
        (0.0, float("inf"), float("nan")),
    ),
    "weight last": Form("root_mean_square_norm", lambda: RootMeanSquare(False), {"Pow": 1, "Div": 1, "Reciprocal": 0}),
    "mean over another axis": Form(
        "root_mean_square_norm", lambda: RootMeanSquare(axis=1), {"Reciprocal": 1, "Div": 0}
    ),
}


@pytest.mark.parametrize(("alone", "opset"), [(True, 13), (True, 21), (False, 18), (False, 23)])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, alone: bool, opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [REWRITES[name] for name in ("transposed_weight", FORMS[name].name)] if alone else None
    check_form(FORMS[name], opset, monkeypatch, chosen)


def test_every_rewrite_has_a_form() -> None:
    assert {form.name for form in FORMS.values()} == FAST


@pytest.mark.parametrize("target", [None, "onnxruntime:cpu", "onnxruntime"])
@pytest.mark.parametrize("name", ["norm of a sum", "root mean square"])
def test_the_forms_of_targets(name: str, target: str | None) -> None:
    """A form that one runtime alone computes faster is not the default."""
    program = onnxplug.to_onnx(
        stirred(FORMS[name].module(), 1),
        (torch.randn(2, 5, 16),),
        plugins=[],
        target=target,
        dynamic_shapes=({0: AUTO},),
    )
    assert FORMS[name].is_in(program) == (target == "onnxruntime:cpu" or name == "root mean square")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["norm of a sum", "root mean square"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, x = stirred(FORMS[name].module(), 1).to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    dynamic = ({0: AUTO, 1: AUTO},)
    onnxplug.to_onnx(model, (x,), plugins=[], dynamic_shapes=dynamic, target="onnxruntime:cpu").verify()


def test_an_epsilon_of_more_axes_than_the_operand() -> None:
    """The result has the axes of the epsilon, which the other form would lose."""
    x, weight = torch.randn(2, 3, 8), torch.rand(8)

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.tensor([[[[1e-6]]]])))

    check(model, x, weight, others=[(x * 3, weight)])
