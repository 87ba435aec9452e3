"""``onnxplug export --weights … --shard … --external …``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxplug_tools.progress import Display
from rich.progress import Progress
from safetensors.torch import save_file

from onnxplug.cli.app import run
from tests.support.tolerances import looser

CODE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.arange(32.0), persistent=False)
        self.a = torch.nn.Linear(32, 32)
        self.b = torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.b(torch.relu(self.a(x + self.offset)))

def make():
    return Model(), (torch.randn(2, 32),)

def without_numbers():
    model, args = make()
    assert all(p.is_meta for p in model.parameters())
    return model, args
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A folder with a model's code and its trained weights."""
    (tmp_path / "my_model.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = {"a.weight": (32, 32), "a.bias": (32,), "b.weight": (32, 32), "b.bias": (32,)}
    result = {name: torch.randn(shape) for name, shape in names.items()}
    save_file(result, "weights.safetensors")
    return result


def check(state: dict[str, torch.Tensor]) -> set[str]:
    """Compares the model with its weights; returns the files that it refers to."""
    session = onnxruntime.InferenceSession("model.onnx")
    x = torch.randn(2, 32)
    y = torch.relu((x + torch.arange(32.0)) @ state["a.weight"].T + state["a.bias"])
    expected = y @ state["b.weight"].T + state["b.bias"]
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], expected, **looser("wide products"))
    stored = onnx.load("model.onnx", load_external_data=False).graph.initializer
    return {e.value for t in stored for e in t.external_data if e.key == "location"}


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ([], set()),
        (["--external-data"], {"model.onnx.data"}),
        (["--shard", "5KB"], {f"model.onnx.data-0000{i}-of-00002" for i in (1, 2)}),
        (["--external", "safetensors"], {"weights.safetensors"}),
    ],
)
def test_weights_of_a_model_without_numbers(
    state: dict[str, torch.Tensor], options: list[str], files: set[str], capsys: Any
) -> None:
    command = [
        "export",
        "my_model.py:without_numbers",
        "-o",
        "model.onnx",
        "--weights",
        "weights.safetensors",
        *options,
    ]
    assert run(command) == 0, capsys.readouterr().err
    assert check(state) == files


def test_several_files_and_weights_that_are_none(state: dict[str, torch.Tensor], capsys: Any) -> None:
    save_file({name: state[name] for name in ("a.weight", "a.bias")}, "first.safetensors")
    torch.save({"b.weight": state["b.weight"], "b.bias": state["b.bias"], "more": torch.ones(1)}, "second.pt")
    command = ["export", "my_model.py:make", "-o", "model.onnx"]
    command += ["--weights", "first.safetensors", "--weights", "second.pt"]
    assert run(command) == 2
    assert "1 weight is not the model's, 'more'" in " ".join(capsys.readouterr().err.split())
    assert not Path("model.onnx").exists()
    assert run([*command, "--no-strict-weights"]) == 0
    check(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "none.safetensors"], "there is no file none.safetensors"),
        (["--shard", "2 gallons"], "the unknown unit 'gallons'"),
        (["--shard", "2GB", "--single-file"], "shard= can't be given together with external_data=False"),
        (["--external", "gguf"], "external= takes 'safetensors' or None, got 'gguf'"),
        (["--external", "safetensors"], "needs weights from safetensors files"),
        (["--strict-weights"], "--strict-weights is about --weights"),
        (["--weights", "weights.safetensors", "--verify"], "--verify compares with the PyTorch model's own weights"),
        (["--weights", "weights.safetensors", "--pieces", "a"], "--weights can't be given together with --pieces"),
        (["--shard", "2GB", "--pieces", "a"], "--shard can't be given together with --pieces"),
    ],
)
def test_wrong_usage(state: dict[str, torch.Tensor], options: list[str], message: str, capsys: Any) -> None:
    assert run(["export", "my_model.py:make", "-o", "model.onnx", *options]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error
    assert not Path("model.onnx").exists()


def test_how_far_it_is() -> None:
    with Progress(disable=True) as bar:
        shown = Display(bar)
        shown.part(1, 2)
        assert not bar.tasks, "no stage yet"
        shown("saving")
        shown.part(1_500_000_000, 28_000_000_000)
        (task,) = bar.tasks
        assert (task.completed, task.total) == (1_500_000_000, 28_000_000_000)
        assert task.description == "saving: 1.5 GB of 28.0 GB ..."
