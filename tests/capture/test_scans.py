"""Loops over tokens in stand-ins for a library's functions: scans in the graph, by operator or torch's function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxplug.patches.scans import scanned
from tests.support.check import check
from tests.support.releases import not_with


class Recurrent(nn.Module):
    """Scans the tokens of [batch, sequence, 4] by a step that it makes."""

    def __init__(self, make: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4) / 4), torch.tensor([0.5, -1.0, 2.0, 0.1])
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return scanned(self.make(self, x), torch.zeros_like(x[:, 0]), (x.transpose(0, 1), x.transpose(0, 1).cos()))


def _by_tensors(model: Any, x: Tensor) -> Any:
    weight, scale, sums, dtype, factor = model.weight, model.scale, x.sum(1), torch.float32, 0.5

    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        state = torch.tanh(state @ weight + token[0] * scale * factor).to(dtype) + sums
        return state, (state + token[1], {"both": token[0] * token[1]})

    return step


def _without_any(model: Any, x: Tensor) -> Any:
    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return state * 0.5 + token[0], state - token[1]

    return step


def _by_a_size(model: Any, x: Tensor) -> Any:
    length = x.shape[1]

    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return state + token[0] / length, state * token[1]

    return step


def _by_a_function(model: Any, x: Tensor) -> Any:
    weight = model.weight

    def mixed(state: Tensor) -> Tensor:
        return state @ weight

    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return mixed(state).sin() + token[0], state * 2

    return step


def _by_an_option(model: Any, x: Tensor) -> Any:
    def step(state: Tensor, token: tuple[Tensor, ...], *, factor: float = 0.25) -> tuple[Tensor, Tensor]:
        return state * factor + token[0], state * 2

    return step


def _partial(model: Any, x: Tensor) -> Any:
    def step(scale: Tensor, state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return state * scale + token[0], state * 2

    return partial(step, model.scale)


_READS_MEMORY = not_with("2.9", "reads the memory of the tensors that a step takes from around it")


@pytest.mark.parametrize(
    "make",
    [
        *(_without_any, _by_a_size, _by_a_function, _by_an_option),
        *(pytest.param(make, marks=_READS_MEMORY) for make in (_by_tensors, _partial)),
    ],
)
def test_steps(make: Callable[[nn.Module, Tensor], Any], seeded: None) -> None:
    x, y, one = torch.randn(2, 5, 4), torch.randn(3, 9, 4), torch.randn(1, 1, 4)
    check(Recurrent(make).eval(), x, dynamic=({0: "batch", 1: "sequence"},), others=[(y,), (one,)])
    program = check(Recurrent(make).eval(), x, others=[(x.flip(1),)])
    assert [node.op_type for node in program.model.graph].count("Scan") == 1
