"""``onnxplug export --report DIR``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from onnxplug.cli.app import run

FILES = ["report.html", "report.json", "report.md", "report.sarif"]
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), (torch.randn(2, 4),)

class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x.flip(0)

def branching():
    return Branching(), (torch.randn(2, 4),)

def broken():
    raise RuntimeError("no model today")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _data(folder: Path, name: str = "report") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return data


def test_a_report_of_a_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "m.onnx", "--verify", "--report", "deep/reports"]) == 0
    assert "report: deep/reports/report.html" in capsys.readouterr().err
    assert sorted(os.listdir(folder / "deep" / "reports")) == FILES
    data = _data(folder / "deep" / "reports")
    assert data["status"] == "exported"
    assert data["arguments"]["verify"] == "True"
    assert len(data["verification"]["cases"]) == 4
    assert data["files"] == [{"path": "m.onnx", "bytes": (folder / "m.onnx").stat().st_size}]
    assert [stage["name"] for stage in data["times"]["stages"]][-2:] == ["verification", "saving"]
    assert sum(stage["name"] == "loading" for stage in data["times"]["stages"]) == 1


@pytest.mark.parametrize(
    ("target", "stage", "place"),
    [("branching", "capture", "my_model.py:9"), ("broken", "loading", None)],
)
def test_a_failed_command(
    target: str, stage: str, place: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", f"my_model.py:{target}", "-o", "m.onnx", "--report", "reports"]) == 1
    printed = capsys.readouterr()
    assert "A report is in reports." in printed.err
    assert "report: " not in printed.out
    failure = _data(folder / "reports")["failure"]
    assert (failure["stage"], failure["place"]) == (stage, place)
    assert sorted(os.listdir(folder / "reports")) == FILES


def test_a_save_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("onnxplug.run.save.flush", full)
    assert run(["export", "my_model.py:make", "-o", "m.onnx", "--report", "reports"]) == 1
    assert _data(folder / "reports")["failure"]["stage"] == "saving"


def test_pieces(folder: Path) -> None:
    assert run(["export", "my_model.py:make", "-o", "out", "--pieces", "0,1", "--report", "reports"]) == 0
    assert sorted(os.listdir(folder / "reports")) == sorted([*FILES, *(f.replace("report", "report-2") for f in FILES)])
    assert _data(folder / "reports", "report-2")["model"].endswith("ReLU")


def test_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "m.onnx", "--report", "my_model.py"]) == 1
    assert "no report can be written to my_model.py" in capsys.readouterr().err
    assert not (folder / "m.onnx").exists()
