"""``onnxplug bench`` and ``onnxplug compare``: their output, their files and their exit status."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest

from onnxplug.cli.app import run
from tests.support.onnx_files import made

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), (torch.randn(3, 4),)

def wrong():
    return torch.nn.ReLU(), (torch.randn(3, 4), torch.randn(3))
"""
QUICK = ["--repeat", "3"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(MODEL)
    for name, factor in (("a", 1.0), ("b", 1.5)):
        nodes = [
            oh.make_node("MatMul", ["x", "0.w"], ["h[red]\x1b[31m"], name="0/MatMul"),
            oh.make_node("Relu", ["h[red]\x1b[31m"], ["y"], name="1/Relu"),
        ]
        onnx.save(made(nodes, weights={"0.w": np.full((4, 4), factor, np.float32)}), f"{name}.onnx")
    np.save("x.npy", np.ones((2, 4), np.float32))
    np.savez("x.npz", x=np.ones((5, 4), np.float32))
    (tmp_path / "evil.npy").write_bytes(pickle.dumps({}))
    (tmp_path / "model.pt2").write_bytes(b"PK\x03\x04")
    return tmp_path


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    return " ".join((printed.out + printed.err).replace("│", " ").split())


def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "a.onnx", "b.onnx", "--sizes", "n=2", "--threads", "1", *QUICK, "--html", "page.html"]) == 0
    printed = _printed(capsys)
    assert "inputs: x float32[2, 4]; threads: 1; CPU" in printed
    assert "a.onnx: time by operator" in printed
    assert "b.onnx: time by module" in printed
    text = Path("page.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "http" not in text
    assert run(["bench", "a.onnx", "--input", "x.npz", *QUICK, "--no-profile", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["inputs"] == {"x": "float32[5, 4]"}
    assert read["models"][0]["timing"]["runs"] == 3
    assert read["models"][0]["profile"] is None


def test_bench_against_pytorch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "a.onnx", "--target", "m.py:make", *QUICK, "--no-profile"]) == 0
    printed = _printed(capsys)
    assert "inputs: x float32[3, 4]" in printed
    assert "PyTorch, eager" in printed
    assert run(["bench", "a.onnx", "--target", "m.py:make", "--input", "x.npy", *QUICK, "--no-profile"]) == 0
    assert "inputs: x float32[2, 4]" in _printed(capsys)
    model = onnx.load("a.onnx")
    model.graph.input.append(oh.make_tensor_value_info("0.w", onnx.TensorProto.FLOAT, [4, 4]))
    onnx.save(model, "old.onnx")  # older files have each weight among the inputs too
    assert run(["bench", "old.onnx", "--target", "m.py:make", *QUICK, "--no-profile"]) == 0
    assert "inputs: x float32[3, 4];" in _printed(capsys)


@pytest.mark.parametrize(
    ("other", "arguments", "status", "output"),
    [
        ("a.onnx", [], 0, "2 of 2 values within the models agree"),
        ("b.onnx", ["--sizes", "n=4"], 1, "0 of 2 values within the models agree"),
        ("b.onnx", ["--rtol", "1"], 0, "2 of 2 values within the models agree"),
        ("b.onnx", ["--input", "x=x.npy"], 1, "inputs: x float32[2, 4] Outputs"),
        ("b.onnx", ["--input", "float32[7,4]", "--no-intermediates"], 1, "inputs: x float32[7, 4] Outputs"),
        ("missing.onnx", [], 2, "there is no file missing.onnx"),
        ("model.pt2", [], 2, "pickled Python"),
        ("a.onnx", ["--input", "z=x.npy"], 2, "no input 'z'"),
        ("a.onnx", ["--input", "x=missing.npy"], 2, "there is no file missing.npy"),
        ("a.onnx", ["--input", "x=evil.npy"], 2, "can't be read"),
        ("a.onnx", ["--input", "x=x.npz"], 2, "has its own names"),
        ("a.onnx", ["--input", "x=float32[2,5]"], 2, "has the shape [2, 5]"),
        ("a.onnx", ["--sizes", "m=2"], 2, "no input has a dimension 'm'"),
    ],
)
def test_compare(
    other: str, arguments: list[str], status: int, output: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", "a.onnx", other, *arguments]) == status
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    assert output in " ".join((printed.out + printed.err).replace("│", " ").split())


def test_compare_says_where_it_begins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "a.onnx", "b.onnx", "--input", "x.npy"]) == 1
    printed = _printed(capsys)
    assert "the first that differs: h[red]\\x1b[31m (MatMul in 0)" in printed
    assert "at [0, 0]: 4.0, then 6.0" in printed
    assert run(["compare", "a.onnx", "b.onnx", "--input", "x.npy", "--json"]) == 1
    assert [value["largest"] for value in json.loads(capsys.readouterr().out)["values"]] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["missing.onnx"], 2, "there is no file"),
        (["model.pt2"], 2, "pickled Python"),
        (["a.onnx", "m.py"], 1, "not an ONNX model"),
        (["a.onnx", "--provider", "abacus"], 2, "has no provider 'abacus'"),
        (["a.onnx", "--threads", "0"], 2, "--threads"),
        (["a.onnx", "--sizes", "n"], 2, "can't be read"),
        (["a.onnx", "b.onnx", "--optimized", "o.onnx"], 2, "one model at a time"),
        (["a.onnx", "--optimized", "missing/o.onnx", *QUICK], 1, "can't write the optimised graph missing/o.onnx"),
        (["a.onnx", "--optimized", ".", *QUICK], 1, "can't write"),
        (["a.onnx", "--target", "m.py:missing"], 2, "has no 'missing'"),
        (["a.onnx", "--target", "m.py:make", "--sizes", "n=2"], 2, "sizes are those of its inputs"),
        (["a.onnx", "--target", "m.py:wrong"], 2, "the target gives 2 tensors"),
        (["a.onnx", "--html", "missing/page.html", *QUICK], 1, "can't write the page"),
    ],
)
def test_errors_of_bench(
    arguments: list[str], status: int, printed: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert run(["bench", *arguments]) == status
    assert printed in _printed(capsys)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before
