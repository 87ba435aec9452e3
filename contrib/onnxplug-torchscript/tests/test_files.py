"""Files that are no scripts: an error describes the content of each, and how its model is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import UsageError
from onnxplug.cli.app import run


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


def state(path: Path) -> None:
    torch.save(_model().state_dict(), path)


def nested(path: Path) -> None:
    torch.save({"epoch": 3, "model": {"layer.weight": torch.zeros(2, 5)}}, path)


def whole(path: Path) -> None:
    torch.save(_model(), path)


def safe(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, path)


def text(path: Path) -> None:
    path.write_text("hello")


def nothing(path: Path) -> None:
    torch.save({"epoch": 3}, path)


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "state.pth": (state, "is a file of 2 tensors, the first of which is 0.weight [3, 4]", "make() builds the module"),
    "state.pt": (state, "is a file of 2 tensors", "make() builds the module"),
    "checkpoint.ckpt": (
        nested,
        "is a file of 1 tensor, the first of which is model.layer.weight [2, 5]",
        "these weights",
    ),
    "whole.bin": (whole, "is a pickled torch.nn.modules.container.Sequential", "weights_only=False"),
    "weights.safetensors": (safe, "is a file of 2 tensors, the first of which is a [2, 3]", "make() builds the module"),
    "text.pth": (text, "is a file that can't be read", "Was it copied"),
    "cut.safetensors": (text, "is a file that can't be read", "Was it copied"),
    "numbers.pth": (nothing, "is a file of torch.save without tensors", "make() builds the module"),
}


@pytest.mark.parametrize("name", CASES)
def test_kinds_of_files(name: str, tmp_path: Path, capsys: Any) -> None:
    write, message, way = CASES[name]
    write(tmp_path / name)
    assert run(["export", str(tmp_path / name), "-o", str(tmp_path / "model.onnx")]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert way in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "model.onnx").exists()


def test_a_script_by_another_name(tmp_path: Path) -> None:
    torch.jit.script(_model()).save(str(tmp_path / "script.pth"))
    arguments = ["-o", str(tmp_path / "model.onnx"), "--input", "input=float32[2,4]", "--verify"]
    assert run(["export", str(tmp_path / "script.pth"), *arguments]) == 0


def test_a_script_without_inputs(tmp_path: Path, capsys: Any) -> None:
    torch.jit.script(_model()).save(str(tmp_path / "script.pt"))
    assert run(["export", str(tmp_path / "script.pt"), "-o", str(tmp_path / "model.onnx")]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "the inputs don't fit forward(input): missing a required argument: 'input'" in printed
    assert "onnxplug export FILE -o PATH --input 'input=float32[2,3]'" in printed
    assert not (tmp_path / "model.onnx").exists()
    with pytest.raises(UsageError, match=r"forward\(input\): missing"):
        onnxplug.to_onnx(torch.jit.script(_model()), ())
