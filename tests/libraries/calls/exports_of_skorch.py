"""The module of a fitted skorch estimator, exported as its users do: ``net.module_``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.libraries.compare import assert_same


class Recurrent(nn.Module):
    """A classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.last = nn.Linear(6, 2)

    def forward(self, X: torch.Tensor) -> torch.Tensor:  # skorch's name
        """[batch, classes]."""
        return self.last(self.lstm(X.reshape(X.shape[0], -1, 8))[0][:, -1])


def _made(*modules: nn.Module) -> Any:
    return lambda: nn.Sequential(*modules)


MODULES = {
    "toy": None,
    "norm": _made(nn.Linear(40, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 2), nn.Softmax(-1)),
    "images": _made(nn.Unflatten(1, (1, 5, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2)),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("name", MODULES)
def test_fitted_classifier(name: str, tmp_path: Path) -> None:
    from skorch import NeuralNetClassifier
    from skorch.toy import make_classifier

    torch.manual_seed(0)
    made = MODULES[name] or make_classifier(input_units=40, num_hidden=2, hidden_units=7, dropout=0.3)
    net = NeuralNetClassifier(made, max_epochs=2, criterion=nn.CrossEntropyLoss, train_split=None, verbose=0)
    data = np.random.default_rng(0).normal(size=(32, 40)).astype("float32")
    net.fit(data, (data[:, 0] > 0).astype("int64"))
    model, file = net.module_.eval(), str(tmp_path / "model.onnx")
    options = {"input_names": ["X"], "output_names": ["y"], "dynamic_axes": {"X": {0: "batch"}, "y": {0: "batch"}}}
    torch.onnx.export(model, torch.from_numpy(data[:4]), file, **options, dynamo=False)
    assert_same(file, model, (torch.from_numpy(data[:4]),), (torch.from_numpy(3 * data[:7]),))


def test_fitted_regressor(tmp_path: Path) -> None:
    from skorch import NeuralNetRegressor
    from skorch.toy import make_regressor

    torch.manual_seed(0)
    net = NeuralNetRegressor(make_regressor(input_units=10), max_epochs=2, train_split=None, verbose=0)
    data = np.random.default_rng(0).normal(size=(32, 10)).astype("float32")
    net.fit(data, data[:, :1])
    model, file = net.module_.eval(), str(tmp_path / "model.onnx")
    torch.onnx.export(model, torch.from_numpy(data[:4]), file, input_names=["X"], dynamic_axes={"X": [0]}, dynamo=False)
    assert_same(file, model, (torch.from_numpy(data[:4]),), (torch.from_numpy(3 * data[:7]),))
