"""Attention that models write out: biases of several layers are added to each other once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.rewrites import attention
from tests.support.forms import AUTO, Form, check_form, stirred

REWRITES = {rewrite.name: rewrite for rewrite in attention.REWRITES}
HEADS, SIZE = 2, 8
Biases = Callable[[torch.Tensor, nn.Parameter], list[torch.Tensor]]


def of_positions(x: torch.Tensor, table: nn.Parameter) -> torch.Tensor:
    """T5's bias of positions, [1, H, S, S]."""
    rows = torch.arange(x.shape[1])
    places = (rows[:, None] - rows[None]).abs().clamp(max=3)
    return table[places].permute(2, 0, 1)[None]


def mask(x: torch.Tensor, hidden: float = torch.finfo(torch.float32).min) -> torch.Tensor:
    """A mask of some of the keys, [B, 1, 1, S]."""
    return torch.where(x[:, :, 0] > 1, hidden, 0.0).to(x.dtype)[:, None, None]


def both(x: torch.Tensor, table: nn.Parameter) -> list[torch.Tensor]:
    return [of_positions(x, table), mask(x)]


def masks(x: torch.Tensor, table: nn.Parameter) -> list[torch.Tensor]:
    """Masks of fewer elements than the scores, which heads share."""
    return [mask(x), table.sum() * x[:, None, :, :1]]


class Layers(nn.Module):
    """Attention of one or two layers to the same biases, added to the scores in turn."""

    def __init__(self, biases: Biases, layers: int = 2, scaled: bool = False, read_again: bool = False) -> None:
        super().__init__()
        self.biases, self.scaled, self.read_again = biases, scaled, read_again
        self.table = nn.Parameter(torch.empty(4, HEADS))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        biases, read = self.biases(x, self.table), []
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            scores = heads @ x.unflatten(-1, (HEADS, SIZE)).permute(0, 2, 3, 1)
            if self.scaled:
                scores = scores / 3.0
            for bias in biases:
                scores = scores + bias
            if self.read_again:
                read.append(scores)
            x = (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)
        return x, *read


FORMS: dict[str, Form] = {
    "two layers": Form("biases_added_once", lambda: Layers(both), {"Add": 3}),
    "scores that are scaled": Form("biases_added_once", lambda: Layers(both, scaled=True), {"Add": 3}),
    "biases of fewer elements": Form("biases_added_once", lambda: Layers(masks, 1), {"Add": 2}),
    "one layer": Form("biases_added_once", lambda: Layers(both, 1), {"Add": 2}),
    "scores that are read again": Form("biases_added_once", lambda: Layers(both, read_again=True), {"Add": 4}),
    "one bias": Form("biases_added_once", lambda: Layers(lambda x, t: both(x, t)[:1]), {"Add": 2}),
}


@pytest.mark.parametrize(("alone", "opset"), [(True, 13), (True, 21), (False, 21)])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, alone: bool, opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Adds are of the scores and of the biases; the layers' own sums are in Gemm."""
    check_form(FORMS[name], opset, monkeypatch, [REWRITES[FORMS[name].name]] if alone else None)


@pytest.mark.parametrize(("dtype", "sums"), [(torch.float16, 4), (torch.float32, 3), (torch.float64, 3)])
def test_half_types_keep_the_order_of_sums(dtype: torch.dtype, sums: int) -> None:
    """The least number and a bias below 0 make −∞ of a half type, and NaN of a row that sees nothing."""
    model, x = stirred(Layers(both), 1).to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    model.biases = lambda x, t: [of_positions(x, t), mask(x, least)]
    program = onnxplug.to_onnx(model, (x,), plugins=[], dynamic_shapes=({0: AUTO, 1: AUTO},))
    added = [node for node in program.model.graph if node.op_type == "Add" and len(node.outputs[0].shape or ()) == 4]
    assert len(added) == sums
    program.verify()
