"""``onnxplug inspect``: its output, its files, its exit status, and files that it refuses."""

from __future__ import annotations

import builtins
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import pytest

from onnxplug.cli.app import run
from tests.support.onnx_files import made

NAME = "[red]x[/red]\x1b]0;owned\x07<script>alert(1)</script>"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three models; the names in the last have a meaning for terminals and browsers."""
    monkeypatch.chdir(tmp_path)
    nodes = [
        oh.make_node("MatMul", ["x", "layers.0.w"], ["a"], name="layers/0/MatMul"),
        oh.make_node("Relu", ["a"], ["y"], name="Relu"),
    ]
    weights = {"layers.0.w": np.ones((4, 4), np.float32)}
    onnx.save(made(nodes, weights=weights), "a.onnx")
    onnx.save(made([nodes[0], oh.make_node("Elu", ["a"], ["y"])], weights=weights), "b.onnx")
    hostile = [
        oh.make_node("Relu", ["x"], [NAME], name=f"{NAME}/Relu"),
        oh.make_node(NAME, [NAME], ["y"], domain="d", k=NAME),
    ]
    onnx.save(made(hostile, weights={f"w{NAME}": np.ones(2, np.float32)}), "hostile.onnx")
    return tmp_path


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "a.onnx", "--sizes", "n=3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "MatMul 1, Relu 1" in printed
    assert "108 FLOP, estimated at n=3" in printed  # 2 * 3 * 4 * 4 + 3 * 4
    assert "layers.0.w │ float[4, 4] │ 64 bytes" in printed
    assert "│ layers │ │ 1 │ 16 │ 64 bytes │ 96 FLOP │" in printed
    assert run(["inspect", "a.onnx", "--depth", "0", "--top", "0"]) == 0
    printed = capsys.readouterr().out
    assert "Modules" not in printed
    assert "Largest" not in printed
    assert "--sizes n=…" in printed


def test_depth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for depth in (1, 2):
        assert run(["inspect", "a.onnx", "--depth", str(depth)]) == 0
        lines = capsys.readouterr().out.split("Modules")[1].split("Largest")[0].splitlines()
        rows.append([line.split("│")[1].strip() for line in lines if line.startswith("│")])
    assert rows == [["(the model)", "layers"], ["(the model)", "layers", "0"]]


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "a.onnx", "--json", "--sizes", "n=3"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["operators"] == {"MatMul": 1, "Relu": 1}
    assert [node["flops"] for node in read["nodes"]] == [96, 12]
    assert read["root"]["children"][0]["path"] == "layers"
    assert run(["inspect", "a.onnx", "--diff", "b.onnx", "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["modules"][0]["removed"][0]["op_type"] == "Relu"


@pytest.mark.parametrize(
    ("dim", "sizes", "operations"),
    [
        ("n", "", "--sizes n=…"),
        ("2*n", "", "--sizes n=…"),
        ("2*n", "n=3", "216 FLOP, estimated at n=3"),
        ("a b", "", "--sizes 'a b=…'"),
        ("a b", "a b=6", "216 FLOP, estimated at a b=6"),
        (-1, "", "2 nodes that there is no estimate for"),  # of some exporters, for an unknown size
    ],
)
def test_sizes(dim: Any, sizes: str, operations: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [oh.make_node("MatMul", ["x", "w"], ["a"]), oh.make_node("Relu", ["a"], ["y"])]
    onnx.save(
        made(nodes, inputs=[("x", [dim, 4])], outputs=[("y", [dim, 4])], weights={"w": np.ones((4, 4))}), "c.onnx"
    )
    assert run(["inspect", "c.onnx", *(["--sizes", sizes] if sizes else [])]) == 0
    assert operations in capsys.readouterr().out


def test_json_without_numbers_that_json_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, number in (("c.onnx", np.inf), ("d.onnx", np.nan)):
        onnx.save(made([oh.make_node("Mul", ["x", "w"], ["y"])], weights={"w": np.float32([1, number])}), name)

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert run(["inspect", "c.onnx", "--diff", "d.onnx", "--json"]) == 1
    (change,) = json.loads(capsys.readouterr().out, parse_constant=refused)["weights"]
    assert change["difference"] == {"count": 1, "total": 2, "largest": "inf", "relative": "inf"}


@pytest.mark.parametrize(
    ("other", "status", "output"),
    [
        ("a.onnx", 0, "the same; 2 nodes and 1 weight without a difference"),
        ("b.onnx", 1, "Elu"),
        ("missing.onnx", 2, "there is no file missing.onnx"),
        ("broken.onnx", 2, "broken.onnx is not an ONNX model"),
    ],
)
def test_exit_status_of_diff(
    other: str, status: int, output: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.onnx").write_bytes(b"broken")
    assert run(["inspect", "a.onnx", "--diff", other]) == status
    printed = capsys.readouterr()
    assert output in printed.out + printed.err


def test_names_do_nothing_to_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["hostile.onnx", "--depth", "9"],
        ["hostile.onnx", "--diff", "a.onnx"],
        ["a.onnx", "--diff", "hostile.onnx"],
    ):
        run(["inspect", *command])
        printed = capsys.readouterr().out
        assert "[red]x" in printed
        assert "\x1b" not in printed
        assert "\x07" not in printed


@pytest.mark.parametrize(
    "arguments", [["hostile.onnx"], ["a.onnx", "--diff", "hostile.onnx"], ["hostile.onnx", "--diff", "a.onnx"]]
)
def test_pages_hold_names_as_text(arguments: list[str], folder: Path) -> None:
    run(["inspect", *arguments, "--html", "page.html"])
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x1b" not in text
    for outside in ("http://", "https://", "src=", "href=", "@import", "url("):
        assert outside not in text
    assert sorted(path.name for path in folder.iterdir()) == ["a.onnx", "b.onnx", "hostile.onnx", "page.html"]


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["missing.onnx"], 2, "there is no file"),
        (["."], 2, "is a folder"),
        (["model.pt2"], 2, "pickled Python"),
        (["a.onnx", "--diff", "model.pt2"], 2, "pickled Python"),
        (["a.onnx", "--sizes", "n"], 2, "--sizes 'n' can't be read"),
        (["a.onnx", "--sizes", "n=3,n=4"], 2, "can't be read"),
        (["a.onnx", "--sizes", "n=-1"], 2, "can't be read"),
        (["a.onnx", "--sizes", "m=1"], 2, "no value of the model has a dimension 'm' hint: They are n."),
        (["a.onnx", "--depth", "-1"], 2, "--depth"),
        (["a.onnx", "--html", "missing/page.html"], 1, "can't write the page"),
        (["a.onnx", "--html", "."], 1, "is a folder"),
        (["a.onnx", "--html", "./a.onnx"], 1, "can't write the page a.onnx: it is the model itself"),
        (["a.onnx", "--diff", "b.onnx", "--html", "b.onnx"], 2, "it is the model itself"),
        (["a.onnx", "--diff", "b.onnx", "--open"], 2, "--open shows one model"),
        (["a.onnx", "--diff", "b.onnx", "--sizes", "n=3"], 2, "--sizes shows one model"),
        (["a.onnx", "--diff", "b.onnx", "--html", "missing/page.html"], 2, "can't write the page"),
    ],
)
def test_errors(
    arguments: list[str], status: int, printed: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.pt2").write_bytes(b"PK\x03\x04")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(["inspect", *arguments]) == status
    assert printed in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = builtins.__import__

    def missing(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *args, **kwargs)

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)


def test_open(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _without(monkeypatch, "netron")
    assert run(["inspect", "a.onnx", "--open"]) == 1
    assert "pip install netron" in capsys.readouterr().err
    monkeypatch.undo()
    calls: list[Any] = []
    netron = types.SimpleNamespace(start=calls.append, wait=lambda: calls.append("waited"))
    monkeypatch.setitem(sys.modules, "netron", netron)  # type: ignore[arg-type]
    assert run(["inspect", str(folder / "a.onnx"), "--open"]) == 0
    assert calls == [str(folder / "a.onnx"), "waited"]
