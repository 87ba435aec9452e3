"""Verification where the eager model chooses otherwise than the captured graph, because capture rounds otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onnxplug
from onnxplug import Rule, VerificationError
from onnxplug.verification import recording
from tests.verification.test_ties import TIED, Chosen, otherwise

#: One unit of rounding: less for every third element, more for the others.
THIRDS = 1 + torch.ones(30).index_fill(0, torch.arange(0, 30, 3), -1.0) * 1.5e-7


class Recaptured(Chosen):
    """Captured with scores that differ from the eager model's by factors."""

    def __init__(self, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], factors: torch.Tensor) -> None:
        super().__init__(choose)
        self.factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.round().cos()
        return self.choose(scores if torch.compiler.is_exporting() else scores * self.factors, x)


@pytest.mark.parametrize("name", TIED)
def test_the_eager_model_may_choose_otherwise_than_the_captured_graph_by_rounding(name: str) -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    model, rule = Recaptured(TIED[name], THIRDS), Rule("aten::cos", otherwise)
    assert onnxplug.to_onnx(model, (x,), rules=[rule]).verify(seeds=()).cases[0].ties
    uneven = torch.linspace(0.5, 1.5, 30) * (-1 if name in ("argmax", "topk") else 1)
    wrong = Rule("aten::cos", lambda g, node: g.op.Mul(otherwise(g, node), g.const(uneven)))
    for other, given in ((model, wrong), (Recaptured(TIED[name], uneven), rule)):
        program = onnxplug.to_onnx(other, (x,), rules=[given])
        with pytest.raises(VerificationError):
            program.verify(seeds=())


def test_the_eager_model_may_call_an_operator_more_often_than_the_captured_graph() -> None:
    def choose(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            scores.topk(2, dim=1)
        return x.gather(1, scores.topk(3, dim=1)[1])

    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    program = onnxplug.to_onnx(Recaptured(choose, THIRDS), (x,), rules=[Rule("aten::cos", otherwise)])
    with pytest.raises(VerificationError):  # which of the calls was captured is not known
        program.verify(seeds=())


class Conditional(Recaptured):
    """With a choice in a function that an operator calls; eager alone, which may refuse modes of PyTorch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            torch.cond(x.sum() > 0, lambda x: x.topk(2, dim=1)[0], lambda x: x[:, :2].clone(), (x,))
        return super().forward(x)


def test_an_eager_model_with_operators_that_call_functions() -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    program = onnxplug.to_onnx(Conditional(TIED["topk"], THIRDS), (x,), rules=[Rule("aten::cos", otherwise)])
    assert program.verify(seeds=()).cases[0].ties


def test_an_eager_model_that_takes_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise TypeError("no mode")

    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    program = onnxplug.to_onnx(Recaptured(TIED["topk"], THIRDS), (x,), rules=[Rule("aten::cos", otherwise)])
    monkeypatch.setattr(recording.EagerValues, "of", refused)
    with pytest.raises(VerificationError):
        program.verify(seeds=())
