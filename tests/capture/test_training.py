"""Warnings about a model that was left in training mode, whole or in part."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug

X = torch.randn(3, 4)


class Calls(nn.Module):
    """A function of the model's mode, the line of which is named."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def said(model: Any, x: torch.Tensor = X) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onnxplug.to_onnx(model, (x,))
    return [str(w.message) for w in caught if "training mode" in str(w.message) and w.filename == __file__]


def part_in_training() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[1].train()
    return model


HERE = r"\(.*test_training.py:\d+\)"
ALWAYS = Calls(lambda model, x: F.dropout(x, 0.5))
MODES = Calls(lambda model, x: F.dropout(x, 0.5, training=model.training) + model.norm(x))
SAID: dict[str, tuple[Callable[[], Any], str]] = {
    "module": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train(),
        r"the model is in training mode: batch norm uses the batch's statistics \(0\) and dropout stays random \(1\) in the exported "
        r"model too. Call model.eval\(\)",
    ),
    "function": (lambda: MODES.train(), f"the model is in training mode: .*dropout stays random {HERE}"),
    "function that always drops": (
        lambda: ALWAYS.eval(),
        rf"parts of the model are in training mode: dropout stays random {HERE} .* give F.dropout training=self.training",
    ),
    "part": (
        part_in_training,
        r"parts of the model are in training mode: batch norm uses the batch's statistics \(1\)",
    ),
    "program": (
        lambda: torch.export.export(nn.Sequential(nn.Dropout(0.5)).train(), (X,)),
        r"parts of the model are in training mode: dropout stays random \(0\)",
    ),
    "recurrent": (lambda: nn.LSTM(4, 4, 2, dropout=0.5).train(), "dropout between its layers stays random"),
    "attention": (
        lambda: Calls(lambda model, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)).eval(),
        f"dropout of attention stays random {HERE}",
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True).train(),
        "the model is in training mode: instance norm uses each instance's statistics in the exported model too",
    ),
    "rrelu": (lambda: Calls(lambda model, x: F.rrelu(x, training=model.training)).train(), "rrelu stays random"),
}


@pytest.mark.parametrize("name", SAID)
def test_training_mode_gives_a_warning(name: str) -> None:
    make, words = SAID[name]
    text = said(make(), X[:, None] if name == "recurrent" else X)
    assert len(text) == 1
    assert re.search(words, text[0]), text


QUIET: dict[str, Callable[[], Any]] = {
    "evaluation": lambda: MODES.eval(),
    "dropout of nothing": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train(),
    "no statistics": lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval(),
    "instances' statistics": lambda: nn.InstanceNorm1d(3).train(),
    "instances' running statistics": lambda: nn.InstanceNorm1d(3, track_running_stats=True).eval(),
    "one layer": lambda: nn.LSTM(4, 4).train(),
    "nothing that trains": lambda: nn.Linear(4, 4).train(),
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_to_say(name: str) -> None:
    assert said(QUIET[name]()) == []


def test_a_model_that_is_not_captured() -> None:
    """The warning is given although the capture fails: the mode may be the cause."""
    model = Calls(lambda model, x: model.norm(x) if float(x.sum()) > 0 else x).train()
    with (
        pytest.warns(UserWarning, match=r"the model is in training mode: it has BatchNorm1d \(norm\)"),
        pytest.raises(onnxplug.CaptureError),
    ):
        onnxplug.to_onnx(model, (X,))


def test_many_places() -> None:
    (text,) = said(nn.Sequential(*(nn.Dropout(0.5) for _ in range(5))).train())
    assert "(0, 1, 2 and elsewhere)" in text


@pytest.mark.filterwarnings("ignore:parts of the model are in training mode")
def test_verification_of_a_random_model() -> None:
    program = onnxplug.to_onnx(ALWAYS.eval(), (torch.randn(9, 9),))
    with pytest.raises(
        onnxplug.VerificationError, match=r"differs from run to run: the model draws random numbers.*model.eval\(\)"
    ):
        program.verify()


@pytest.mark.filterwarnings("ignore:parts of the model are in training mode")
def test_verification_of_a_random_model_runs_it_a_few_times() -> None:
    """The verdict needs no measure of rounding and no record of choices: runs that take long, operator by operator."""
    model = Calls(lambda model, x: F.dropout(x.sort(-1).values.cumsum(-1), 0.5, training=True)).eval()
    program = onnxplug.to_onnx(model, (torch.randn(9, 9),))
    calls: list[None] = []
    with (
        nn.modules.module.register_module_forward_hook(lambda *_: calls.append(None)),  # of copies of the model too
        pytest.raises(onnxplug.VerificationError, match="the model draws random numbers"),
    ):
        program.verify()
    assert len(calls) <= 6
