"""``onnxplug diagnose``: its output and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxplug.cli.app import run

MODEL = """
import torch

class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x.flip(0)

def good():
    return torch.nn.Linear(4, 3), (torch.randn(2, 4),)

def bad():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), Branch()), (torch.randn(2, 4),)

def fixed():
    return lambda x: x + torch.zeros(2, 1), (torch.randn(2, 4),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "diagnosed_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_that_exports(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", "diagnosed_model.py:good", "--dynamic", "input=batch,_"]) == 0
    assert "Nothing is wrong" in capsys.readouterr().out


def test_a_model_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", "diagnosed_model.py:bad"]) == 1
    printed = capsys.readouterr()
    assert "fails" in printed.out
    assert "Branch" in printed.out
    assert printed.err == ""  # no terminal: no stages


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", "diagnosed_model.py:bad", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["submodule"] == "1"
    assert [piece["path"] for piece in document["pieces"] if piece["is_cause"]] == ["1"]


def test_a_fixed_dimension(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", "diagnosed_model.py:fixed", "--dynamic", "x=batch,_"]) == 1
    assert "With static sizes it is captured" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["diagnosed_model.py:none"], ["nowhere.py:f"], [], ["--opset", "x", "m.py:f"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(["diagnose", *arguments]) == 2
