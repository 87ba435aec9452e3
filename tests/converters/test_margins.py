"""Losses with margins: targets that end early, all and no targets, NaN, weights, and no batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from tests.support.check import check

REDUCTIONS = ("none", "mean", "sum")
#: Targets of rows with four classes: some, none, all, one twice, and numbers after the end.
LABELS = torch.tensor([[3, 0, -1, 1], [-1, -1, -1, -1], [0, 1, 2, 3], [2, 2, -1, -1], [1, -1, 3, 3]])


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multilabel_margin_loss(reduction: str, dtype: torch.dtype) -> None:
    spoilt = torch.tensor([[math.nan, 1.0, math.inf, -math.inf], [0.0, math.inf, 2.0, math.nan]], dtype=dtype)
    others = [(spoilt, LABELS[:2]), (scores(1, 4).to(dtype), LABELS[4:]), (scores(2, 4).to(dtype), LABELS[2:4])]

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    check(loss, scores(5, 4).to(dtype), LABELS, others=others, dynamic=True)


@pytest.mark.parametrize("weight", [None, torch.tensor([0.0, 1.5, -2.0, 1.0])])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multi_margin_loss(reduction: str, p: int, weight: torch.Tensor | None) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(x, target, p=p, margin=0.7, weight=weight, reduction=reduction)

    spoilt = torch.tensor([[math.nan, 1.0, math.inf, -math.inf], [0.0, math.nan, 2.0, 0.5]])
    others = [(spoilt, torch.tensor([1, 0])), (scores(1, 4), torch.tensor([3]))]
    dynamic = ({0: torch.export.Dim.DYNAMIC},) * 2
    check(loss, scores(5, 4), torch.tensor([0, 1, 2, 3, 1]), others=others, dynamic=dynamic)


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_scores_without_a_batch(loss: Any) -> None:
    target = torch.tensor(2) if loss is F.multi_margin_loss else LABELS[0]
    for reduction in ("mean", "sum"):
        check(lambda x: loss(x, target, reduction=reduction), scores(4), others=[(scores(4, seed=1),)])  # noqa: B023
    with pytest.raises(onnxplug.ConversionError, match="give the scores a batch"):
        onnxplug.to_onnx(_Unreduced(loss, target), (scores(4),))


class _Unreduced(torch.nn.Module):
    def __init__(self, loss: Any, target: torch.Tensor) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("target", target)

    def forward(self, x: torch.Tensor) -> Any:
        return self.loss(x, self.target, reduction="none")
