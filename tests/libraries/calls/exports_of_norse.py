"""Networks of spiking neurons, for one step and for a film of several steps, by ``torch.onnx.export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import norse.torch as norse
import pytest
import torch
from torch import nn

from tests.libraries.compare import assert_same

CELLS = ["LIFCell", "LIFBoxCell", "LICell", "IAFCell", "LSNNCell", "IzhikevichCell"]


class Steps(nn.Module):
    """A network that sees the same image for several steps; what the last layer says in each is added up."""

    def __init__(self, network: nn.Module, steps: int) -> None:
        super().__init__()
        self.network = network
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, features]."""
        state, total = None, torch.zeros(())
        for _ in range(self.steps):
            spikes, state = self.network(x, state)
            total = total + spikes
        return total


def cell(name: str) -> Any:
    """A cell with its defaults."""
    return (
        norse.IzhikevichCell(norse.functional.izhikevich.tonic_spiking)
        if name == "IzhikevichCell"
        else getattr(norse, name)()
    )


@pytest.mark.parametrize("name", CELLS)
def test_cells(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Steps(norse.SequentialState(nn.Linear(6, 5), cell(name), nn.Linear(5, 3)), 4).eval()
    file = str(tmp_path / "model.onnx")
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}, "opset_version": 17}
    torch.onnx.export(model, (4 * torch.rand(2, 6),), file, **options, dynamo=False)
    assert_same(file, model, (4 * torch.rand(2, 6),), (9 * torch.rand(3, 6),))


@pytest.mark.parametrize("name", ["LIF", "LIFRecurrent", "LI"])
def test_layers_over_time(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = norse.LIFRecurrent(5, 5) if name == "LIFRecurrent" else getattr(norse, name)()
    model = norse.SequentialState(nn.Linear(6, 5), layer).eval()
    first, file = _First(model), str(tmp_path / "model.onnx")
    options = {"input_names": ["x"], "dynamic_axes": {"x": {1: "batch"}}, "opset_version": 17}
    torch.onnx.export(first, (4 * torch.rand(7, 2, 6),), file, **options, dynamo=False)
    assert_same(file, first, (4 * torch.rand(7, 2, 6),), (9 * torch.rand(7, 3, 6),))


class _First(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[0]


def test_convolutional(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = norse.SequentialState(
        nn.Conv2d(1, 4, 3), norse.LIFCell(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 49, 10), norse.LICell()
    )
    model, file = Steps(network, 3).eval(), str(tmp_path / "model.onnx")
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}, "opset_version": 17}
    torch.onnx.export(model, (4 * torch.rand(2, 1, 16, 16),), file, **options, dynamo=False)
    assert_same(file, model, (4 * torch.rand(2, 1, 16, 16),), (9 * torch.rand(3, 1, 16, 16),))
