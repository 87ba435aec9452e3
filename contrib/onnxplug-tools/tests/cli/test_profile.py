"""``onnxplug export --profile [FILE]``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxplug.cli.app import run
from onnxplug.cli.profile import with_value
from tests.support.trace_events import check_trace

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), (torch.randn(2, 4),)

class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x.flip(0)

def branching():
    return Branching(), (torch.randn(2, 4),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("argument", "read"),
    [
        ("t -o m", "t -o m"),
        ("t --profile -o m", "t --profile=- -o m"),
        ("--profile t -o m", "--profile=- t -o m"),
        ("t --profile", "t --profile=-"),
        ("t --profile p.json -o m", "t --profile p.json -o m"),
        ("t --profile P.JSON", "t --profile P.JSON"),
        ("t --profile=p.txt", "t --profile=p.txt"),
        ("-- --profile", "-- --profile"),
    ],
)
def test_the_value_may_be_left_out(argument: str, read: str) -> None:
    assert with_value(argument.split()) == read.split()


def test_table_and_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--profile", "my_model.py:make", "-o", "m.onnx", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("FX nodes") < printed.index("Stages: ")
    for stage in ("loading", "export", "  capture", "verification", "saving"):
        assert f"\n{stage} " in printed
    assert sorted(path.name for path in folder.glob("*.*")) == ["m.onnx", "my_model.py"]
    assert run(["export", "my_model.py:make", "-o", "m.onnx", "--profile", "p.json"]) == 0
    assert "written: p.json" in capsys.readouterr().out
    events = check_trace(json.loads((folder / "p.json").read_text(encoding="utf-8")))
    assert {"loading", "plugins", "capture", "aten::relu.default", "saving"} <= {event["name"] for event in events}


def test_of_pieces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "pieces", "--pieces", "0,1", "--profile"]) == 0
    assert "  the piece 1 " in capsys.readouterr().out


def test_after_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:branching", "-o", "m.onnx", "--profile", "p.json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.index("Stages: ") < printed.err.index("written: p.json") < printed.err.index("error: ")
    sums = json.loads((folder / "p.json").read_text(encoding="utf-8"))["otherData"]
    assert [stage["name"] for stage in sums["stages"]] == ["loading", "plugins", "export"]
    assert sums["stages"][-1]["about"]["error"] == "CaptureError"


@pytest.mark.parametrize("name", ["no/p.json", ".", ""])
def test_a_file_that_cannot_be(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "m.onnx", f"--profile={name}"]) == 2
    assert "--profile: there can be no file" in capsys.readouterr().err
    assert not (folder / "m.onnx").exists()


@pytest.mark.parametrize("name", ["m.onnx", "./sub/../m.onnx"])
def test_the_profile_never_replaces_the_model(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sub").mkdir()
    assert run(["export", "my_model.py:make", "-o", "m.onnx", f"--profile={name}"]) == 1
    assert "the model is there" in capsys.readouterr().err
    assert run(["inspect", "m.onnx"]) == 0
