"""ONNX Runtime's kernels may be less exact than PyTorch's; a fault beside them is a difference of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug
from onnxplug import Rule, VerificationError
from onnxplug.verification.conditioning import rounding_slack
from onnxplug.verification.kernels import moved_apart
from tests.support.check import Call


def times(factor: float) -> Any:
    return lambda g, node: g.op.Mul(g.call_next(node), g.const(factor, node.outputs[0].dtype))


def plus(amount: float) -> Any:
    return lambda g, node: g.op.Add(g.call_next(node), g.const(amount, node.outputs[0].dtype))


def plus_of_elements(amount: float) -> Any:
    """A rule for topk that adds to the elements."""

    def convert(g: Any, node: Any) -> Any:
        values, indices = g.call_next(node)
        return g.op.Add(values, g.const(amount, torch.float32)), indices

    return convert


X = torch.randn(2, 4, 126, generator=torch.Generator().manual_seed(0))

#: A model, its operand, and rules that make it wrong.
CASES: dict[str, tuple[Callable[..., Any], torch.Tensor, dict[str, Any]]] = {
    "small scores": (lambda x: (0.1 * x - 11.6).sigmoid(), X, {"aten::sigmoid": times(1.1), "aten::mul": times(3)}),
    "small scores in half precision": (lambda x: (x - 12).sigmoid(), X.half(), {"aten::sigmoid": plus(4e-6)}),
    "their mean": (lambda x: (0.1 * x - 11.6).sigmoid().mean(-1), X, {"aten::sigmoid": times(1.1)}),
    "the largest": (
        lambda x: (0.1 * x - 11.6).sigmoid().flatten(1).topk(20),
        X,
        {"aten::topk": plus_of_elements(2e-6)},
    ),
    "those above a threshold": (lambda x: (0.1 * x - 11.6).sigmoid() > 9.2e-6, X, {"aten::sigmoid": times(1.2)}),
    "their logarithms": (lambda x: (x - 11).sigmoid().log(), X, {"aten::log": times(1.01), "aten::sigmoid": times(4)}),
    "their logits": (lambda x: (x - 10).sigmoid().logit(), X, {"aten::logit": times(1.01)}),
    "what sigmoid leaves of 1": (lambda x: 1 - (x + 11).sigmoid(), X, {"aten::sigmoid": times(0.99999)}),
    "silu of large negative numbers": (lambda x: F.silu(x - 12), X, {"aten::silu": times(1.3)}),
    "small gates": (lambda x: F.glu(x - 11), X, {"aten::glu": times(1.3)}),
    "small scales": (lambda x: x * (x.mean(-1, keepdim=True) - 12).sigmoid(), X, {"aten::sigmoid": times(1.1)}),
    "gelu of large negative numbers": (lambda x: F.gelu(0.3 * x - 4.5), X, {"aten::gelu": times(2)}),
    "its form with tanh": (lambda x: F.gelu(0.3 * x - 4.5, approximate="tanh"), X, {"aten::gelu": times(2)}),
    "elu near 0": (lambda x: F.elu(-x.abs() * 1e-4, 0.5), X, {"aten::elu": times(1.01)}),
    "selu near 0": (lambda x: F.selu(-x.abs() * 1e-4), X, {"aten::selu": times(1.01)}),
    "celu near 0": (lambda x: F.celu(-x.abs() * 1e-4, 0.7), X, {"aten::celu": times(1.01)}),
    "what tanh leaves": (lambda x: F.tanhshrink(x * 0.01), X, {"aten::tanh": times(1.00001)}),
    "what erf leaves of 1": (lambda x: 1 - (x * 0.2 + 3).erf(), X, {"aten::erf": times(0.99999)}),
    "what tanh leaves of 1 in double precision": (
        lambda x: 1 - (x * 0.5 + 9).tanh(),
        X.double(),
        {"aten::mul": times(1.001)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_less_exact_kernels_are_no_difference(name: str) -> None:
    function, x, _ = CASES[name]
    program = onnxplug.to_onnx(Call(function), (x,), dynamic_shapes=(({0: "batch"},),))
    assert {case.runtime for case in program.verify(seeds=range(3)).cases} == {"onnxruntime"}


@pytest.mark.parametrize(("name", "operator"), [(name, operator) for name in CASES for operator in CASES[name][2]])
def test_a_fault_beside_them_is_an_error(name: str, operator: str) -> None:
    function, x, faults = CASES[name]
    program = onnxplug.to_onnx(Call(function), (x,), rules=[Rule(operator, faults[operator])])
    with pytest.raises(VerificationError):
        program.verify(seeds=())


def test_closed_gates_of_an_lstm() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 6).eval()
    with torch.no_grad():
        model.bias_ih_l0[-6:] = -11.5  # of the output gate
    program = onnxplug.to_onnx(model, (torch.randn(3, 5, 4),), dynamic_shapes=({0: "time", 1: "batch"},))
    assert program.verify(seeds=range(3)).cases
    weight = next(v for v in program.model.graph.initializers.values() if v.const_value and v.const_value.size == 96)
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * 1.5, name=weight.name)
    program.release()
    with pytest.raises(VerificationError):
        program.verify(seeds=())


def distance(operator: Any, y: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The distance that verification assumes between the kernels of an operator, for each element."""
    moved = [moved_apart(operator, (args, kwargs), y, up=up).double() - y for up in (True, False)]
    return moved[0].abs().maximum(moved[1].abs())


ATEN = torch.ops.aten
#: A function, the least and the largest operand, and the operator.
MEASURED: dict[str, tuple[Callable[..., Any], float, float, Callable[..., torch.Tensor]]] = {
    "sigmoid": (torch.sigmoid, -18, -8, partial(distance, ATEN.sigmoid.default)),
    "silu": (F.silu, -18, -8, partial(distance, ATEN.silu.default)),
    "gelu": (F.gelu, -5.5, -3, partial(distance, ATEN.gelu.default)),
    "elu": (F.elu, -1e-3, -1e-7, partial(distance, ATEN.elu.default)),
    "selu": (F.selu, -1e-3, -1e-7, partial(distance, ATEN.elu.default, alpha=1.6733, scale=1.0507)),
    "celu": (lambda x: F.celu(x, 0.7), -1e-3, -1e-7, partial(distance, ATEN.celu.default, alpha=0.7)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_distances_are_measured(name: str) -> None:
    """No element is off by more than twice the table's distance, and some are beyond the usual tolerance."""
    function, least, most, far = MEASURED[name]
    x = torch.linspace(least, most, 20001)
    wanted = function(x)
    difference = (onnxplug.to_onnx(Call(function), (x,))(x)[0].double() - wanted).abs()
    assert bool((difference <= 2 * far(wanted, x)).all())
    assert bool((difference > 1e-4 * wanted.abs()).any())


class Anchored(nn.Module):
    """Small scores, and places that are computed once for each module."""

    @lru_cache  # noqa: B019
    def places(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32) / count

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (0.1 * x - 11.6).sigmoid(), x * self.places(x.shape[-1])


def test_results_that_are_kept_for_each_module() -> None:
    """A copy with other weights calls more operators than the model, which has been called before."""
    model = Anchored()
    model(X)
    onnxplug.to_onnx(model, (X,)).verify()
    with pytest.raises(VerificationError, match="differ"):
        onnxplug.to_onnx(model, (X,), rules=[Rule("aten::sigmoid", times(1.1))]).verify()


def test_other_models_get_no_slack() -> None:
    """The slack of operators with exact kernels comes from moved operands alone."""

    def slack(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        made = rounding_slack(lambda model, leaves: [("y", model(*leaves))], function, [x])[0]
        assert made is not None
        return made

    x = X - 11
    assert float(slack(torch.sigmoid, x).min()) > 1e-7
    assert float((slack(torch.exp, x) / x.exp()).max()) < 1e-3
    assert float((slack(F.softplus, x) / F.softplus(x)).max()) < 1e-3
