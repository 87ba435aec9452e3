"""Comforts of the command line: hints at names, patterns, sizes, warnings, flags anywhere, and broken files."""

from __future__ import annotations

import io
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from onnxplug_tools.library.names import matches
from rich.console import Console

import onnxplug
from onnxplug.cli import report
from onnxplug.cli.app import run
from onnxplug.cli.warned import warnings_shown
from onnxplug.registry.registry import RuleWarning
from tests.support.distributions import Dist, place, run_python

MODEL = """
import torch
import onnxplug

class Network(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x) + 1

def make_network():
    return Network(), (torch.randn(2, 3),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "comfort_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["exprot", "x"], 2, "Did you mean 'export'?"),
        (["export", "comfort_model.py:make_netwrk", "-o", "m.onnx"], 2, "Did you mean 'make_network'?"),
        (
            ["export", "transformers:some_folder", "-o", "m.onnx"],
            2,
            "comes from the plugin package onnxplug-transformers",
        ),
        (["why", "aten::gelux"], 1, "Did you mean 'aten::gelu'"),
        (["ops", "aten::gelux"], 1, "Did you mean 'aten::gelu'"),
        (["plugins", "show", "bultin"], 2, "Did you mean 'builtin'?"),
        (["plugins", "check", "bultin"], 2, "Did you mean 'builtin'?"),
        (["plugins", "check", "--opset", "21", "--opset", "99"], 2, "opset 99 is not supported"),
        (["ops", "--plugin", "onnxplg"], 2, "Did you mean 'onnxplug'?"),
        (["plugins", "list", "--require-plugin", "=="], 2, "not a valid requirement"),
    ],
)
def test_hints(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, expected: str
) -> None:
    assert run(arguments) == status
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("op", "dtype", "key"),
    [
        ("aten::mul.Tensor", "complex64", "complex:aten::mul"),
        ("complex:aten::mul", "complex64", "complex:aten::mul"),
        ("mul.Tensor", "complex128", "complex:aten::mul"),
        ("torch.ops.aten.mul.Tensor", "complex64", "complex:aten::mul"),
        ("aten::view", "quint8", "quantized:aten::view"),
        ("aten::mul.Tensor", "bool", "aten::mul.Tensor"),
    ],
)
def test_why_has_the_rules_of_the_dtype(op: str, dtype: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that an export would take: operators of complex numbers and of quantised tensors have keys of their own."""
    assert run(["why", op, "--dtype", dtype]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert {row[1].strip() for row in rows} == {key}


@pytest.mark.parametrize("command", [[], ["export"], ["plugins"], ["plugins", "check"], ["why"], ["inspect"]])
def test_short_form_of_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "-h"]) == 0
    assert "Usage: onnxplug" in capsys.readouterr().out


def test_help_is_whole_at_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option under a heading, with its whole name and no Python type."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["export", "--help"]) == 0
    shown = capsys.readouterr().out
    panels = [line.strip("╭─╮") for line in shown.splitlines() if line.startswith("╭")]
    assert [panel.strip() for panel in panels] == [
        *("Arguments", "Options", "Inputs and outputs", "Weights", "The ONNX graph"),
        *("Verification and reports", "Capture by torch.export", "Plugins"),
    ]
    options = shown[shown.index("Options") :]
    assert "bool>" not in options
    assert "…  " not in options, "an option's name is cut"
    assert "--no-strict-weights" in options


def test_completion_is_offered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The shell is looked for among the parent processes, and a detached run has no shell there.
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    with pytest.raises(SystemExit) as left:
        run(["--show-completion", "bash"])
    assert not left.value.code
    assert "_ONNXPLUG_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--debug", "export", "comfort_model.py:make_network", "-o", "m.onnx", "--rules-are-none"],
        ["export", "--debug", "absent.py:make", "-o", "m.onnx"],
        ["inspect", "absent.onnx", "--debug"],
        ["plugins", "show", "--debug", "ghost"],
    ],
)
def test_debug_anywhere(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "--rules-are-none" in arguments:
        assert run(arguments) == 2
        assert "No such option: --rules-are-none" in capsys.readouterr().err
        return
    with pytest.raises(Exception, match=r"absent|ghost"):  # the traceback
        run(arguments)


@pytest.mark.parametrize(
    ("pattern", "result"),
    [
        ("aten::gelu", True),
        ("aten::gelu.default", True),
        ("aten::*lu*", True),
        ("aten.gelu", True),
        ("torch.ops.aten.gelu.default", True),
        ("aten::gel", False),
        ("aten::gelu.out", False),
        ("gelu", False),
    ],
)
def test_patterns(pattern: str, result: bool) -> None:
    assert matches("aten::gelu.default", pattern) is result


@pytest.mark.parametrize("pattern", ["aten::gelu", "aten::gel*", "torch.ops.aten.gelu.default", "gelu", "gelu.default"])
def test_why_and_ops_take_the_same(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("why", "ops"):
        assert run([command, pattern]) == 0
        assert "aten::gelu.default" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"garbage", "half"])
def test_broken_program(folder: Path, content: bytes | str, capfd: pytest.CaptureFixture[str]) -> None:
    if isinstance(content, str):
        torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.randn(1, 2),)), "whole.pt2")
        whole = Path("whole.pt2").read_bytes()
        content = whole[: len(whole) // 2]
    Path("broken.pt2").write_bytes(content)
    assert run(["export", "broken.pt2", "-o", "m.onnx"]) == 1
    printed = capfd.readouterr().err
    assert "broken.pt2 is not a program that torch.export.save wrote" in printed
    assert "Traceback" not in printed
    assert not Path("m.onnx").exists()


def test_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "comfort_model.py:make_network", "-o", "m.onnx"]) == 0
    printed = capsys.readouterr().out
    assert " bytes)" in printed
    assert "onnxplug 2" in printed


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 bytes"), (1500, "1.5 kB"), (2_500_000, "2.5 MB"), (3_000_000_000, "3.0 GB")]
)
def test_sizes(size: int, text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(size)  # zeros: no model, so no data beside it
    assert report.size_text(path) == text


def test_seconds_beside_the_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(report, "err", Console(file=shown, force_terminal=True, highlight=False, width=100))
    with report.progress() as stage:
        stage("capture")
        time.sleep(1.2)
        stage("conversion")
    text = shown.getvalue()
    assert "capture ..." in text
    assert "0:00:01" in text
    assert "capture: 1." in text


def test_warnings_without_lines_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_shown():
        warnings.simplefilter("always")
        warnings.warn("a rule is ignored", RuleWarning, stacklevel=1)
        warnings.warn_explicit("an old model", UserWarning, report.__file__, 12)
        warnings.warn_explicit("of another library", DeprecationWarning, "/elsewhere/other.py", 34)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "warning: a rule is ignored",
        "warning: an old model",
        "warning: of another library (/elsewhere/other.py:34, DeprecationWarning)",
    ]


def test_warning_of_a_plugin(tmp_path: Path) -> None:
    module = """
        import warnings
        from onnxplug import hookimpl
        warnings.warn("the kernel is slow here")
        @hookimpl
        def onnxplug_rules(): return []
    """
    place(tmp_path, Dist("shop", textwrap.dedent(module)))
    printed = run_python(tmp_path, "-m", "onnxplug", "ops", "aten::gelu")
    assert "warning: shop: the kernel is slow here" in printed


def test_interrupted(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "slow.py").write_text("def make():\n    raise KeyboardInterrupt\n", encoding="utf-8")
    assert run(["export", "slow.py:make", "-o", "m.onnx"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert "slow" in sys.modules
    assert not Path("m.onnx").exists()


LIBRARY = """
    from onnxplug import OpSample, PluginInfo, Rule, hookimpl
    def convert(g, node): return g.op.Mul(node.args[0], 2.0)
    @hookimpl
    def onnxplug_rules():
        return [Rule("absent_library::double", convert), Rule("absent_library::half", convert), Rule("aten::relu", convert, override=True)]
    @hookimpl
    def onnxplug_samples(): return [OpSample("absent_library::double", lambda: ())]
    @hookimpl
    def onnxplug_info(): return PluginInfo(namespaces=("absent_library",))
"""


def test_absent_library_is_a_note(tmp_path: Path) -> None:
    place(tmp_path, Dist("shop", textwrap.dedent(LIBRARY)))
    printed = run_python(tmp_path, "-m", "onnxplug", "plugins", "check")
    assert "note  shop: absent library: absent_library is not installed: 2 rules" in printed
    misspelt = textwrap.dedent(LIBRARY).replace('Rule("absent_library::half', 'Rule("absent_librarry::half')
    (tmp_path / "other").mkdir()
    place(tmp_path / "other", Dist("shop", misspelt))
    assert "torch does not know absent_librarry::half" in run_python(
        tmp_path / "other", "-m", "onnxplug", "plugins", "check", status=1
    )


def test_why_names_the_setting(tmp_path: Path) -> None:
    place(tmp_path, Dist("shop", textwrap.dedent(LIBRARY)))
    assert "aten::relu=shop" not in run_python(tmp_path, "-m", "onnxplug", "why", "aten::relu")
    preferred = run_python(tmp_path, "-m", "onnxplug", "why", "aten::relu", "--prefer", "aten::relu=shop")
    assert "aten::relu=shop" in preferred
    without = run_python(tmp_path, "-m", "onnxplug", "why", "aten::relu", "--no-plugin", "shop")
    assert "left out by a setting: shop" in without


def test_nodes_by_package() -> None:
    rule = onnxplug.Rule("aten::relu.default", lambda g, node: g.op.Max(g.op.Neg(g.op.Neg(node.args[0])), 0.0))
    program = onnxplug.to_onnx(lambda x: torch.relu(x).sin() + 1, (torch.randn(2, 3),), rules=[rule], optimize=False)
    assert program.statistics.packages == {"rules of the call": 3, "onnxplug": 2}
