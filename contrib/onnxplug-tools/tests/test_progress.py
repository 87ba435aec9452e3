"""The display of an export: on a terminal the stage, its progress and its seconds; elsewhere nothing."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools import progress
from rich.console import Console

import onnxplug
from onnxplug import UsageError
from onnxplug.cli import report
from onnxplug.cli.app import run
from onnxplug.cli.report import displayed
from onnxplug.observers import step
from onnxplug.progress import Display, showing, shown

X = torch.randn(2, 4)


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Puts a terminal at standard error and returns it. No fixture: pytest sets standard error as the test begins."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", result := Terminal())
    return result


def lines(terminal: io.StringIO) -> list[str]:
    """The text that a terminal got, each change a line, without control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_stages_steps_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(progress, "WORTH_A_LINE", 0.3)
    with displayed() as display:
        assert shown() is display
        display("capture")
        time.sleep(0.4)
        display("verification")
        step("inputs 2 of 4", 1, 4)
        time.sleep(0.2)
        display.part(1_500_000, 3_000_000)
        time.sleep(0.2)
        display("saving")
    assert shown() is None
    step("nobody is told")
    result = lines(terminal)
    for text in ("capture ...", "verification: inputs 2 of 4 ...", "verification: 1.5 MB of 3.0 MB ..."):
        assert any(text in line for line in result), text
    assert any("0:00:00" in line for line in result)
    left = [line for line in result if re.fullmatch(r"\w+: \d\.\d s", line)]
    assert [line.partition(":")[0] for line in left] == ["capture", "verification"]


def test_the_spinner_turns_while_torch_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    from onnxplug.capture.quiet import quiet

    with displayed() as display:
        display("capture")
        with quiet():
            time.sleep(0.2)
            before = len(terminal.getvalue())
            step("attempt 2, strict")
            time.sleep(0.4)
            assert len(terminal.getvalue()) > before
    assert any("capture: attempt 2, strict ..." in line for line in lines(terminal))


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WORTH_A_LINE", 0.0)
    with displayed() as display:
        display("capture")
        step("attempt 2")
        display.part(1, 2)
    assert isinstance(display, Display)
    program = onnxplug.to_onnx(torch.nn.ReLU(), (X,), progress=True)
    program.verify(progress=True)
    onnxplug.diagnose(torch.nn.ReLU(), (X,), progress=True)
    assert onnxplug.bisect(torch.nn.ReLU(), (X,), progress=True).trouble is None
    assert capsys.readouterr() == ("", "")


def test_the_console_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    console = Console(stderr=True)
    with displayed(console):
        console.print("beside the spinner")
    assert vars(console)["_file"] is None
    inputs = Console(file=io.StringIO(), force_terminal=True)
    with displayed(inputs) as display:
        display("capture")
    assert inputs.file is vars(inputs)["_file"]
    assert "beside the spinner" in lines(terminal)


def test_an_export_with_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(progress, "WORTH_A_LINE", 0.0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    program = onnxplug.to_onnx(model, (X,), tmp_path / "m.onnx", verify=True, progress=True)
    stages = ["capture", "conversion", "verification", "saving"]
    assert [line.partition(":")[0] for line in lines(terminal) if re.fullmatch(r"\w+: \d\.\d s", line)] == stages
    terminal.seek(0)
    terminal.truncate(0)
    program.verify(progress=True)
    assert any(line.startswith("verification: ") for line in lines(terminal))
    terminal.seek(0)
    terminal.truncate(0)
    with displayed() as display:
        display("mine")
        onnxplug.to_onnx(model, (X,), progress=True)  # in the display that exists already
    assert [line.partition(":")[0] for line in lines(terminal) if re.fullmatch(r"\w+: \d\.\d s", line)] == [
        "mine",
        *stages[:2],
    ]


@pytest.mark.parametrize("value", ["yes", 1, 0.5])
def test_malformed(value: Any) -> None:
    with pytest.raises(UsageError, match="progress takes True, False or a function"), showing(value):
        pass
    with pytest.raises(UsageError, match="progress takes True, False or a function"):
        onnxplug.to_onnx(torch.nn.ReLU(), (X,), progress=value)


def test_functions_receive_the_stages() -> None:
    notices: list[str] = []
    onnxplug.to_onnx(torch.nn.ReLU(), (X,), progress=notices.append)
    assert notices == ["capture", "conversion"]
    with showing(notices.append) as result:
        assert result == notices.append
    for nobody in (None, False):
        with showing(nobody) as result:
            assert result is None


MODELS = """
import torch

class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x.flip(0)

@torch.library.custom_op("progress::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x + 1
op.register_fake(torch.empty_like)

def make():
    return torch.nn.ReLU(), (torch.randn(2),)

def branching():
    return torch.nn.Sequential(torch.nn.ReLU(), Branch()), (torch.randn(2),)

def lacking():
    return lambda x: op(x).relu(), (torch.randn(2),)
"""


@pytest.mark.long
def test_commands_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a file and a pipe, commands show nothing: tests/cli/test_cli.py."""
    (tmp_path / "m.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(report, "err", Console(stderr=True, highlight=False, soft_wrap=True))
    for command, stages in {
        "export m.py:make -o m.onnx --verify": ("loading", "capture", "verification: inputs 2 of 4", "saving"),
        "verify m.onnx m.py:make": ("loading", "verification: inputs 4 of 4"),
        "diagnose m.py:make": ("loading", "running the model", "exporting the model"),
        "bisect m.py:make": ("loading", "looking for the fault"),
        "ops --missing m.py:make": ("loading", "capture"),
        "inspect m.onnx": ("loading",),
        "plugins list": ("importing plugins",),
        "diagnose m.py:branching": ("exporting submodules: 1, 2 of at most 40", "torch.export.draft_export"),
        "bisect m.py:lacking": ("reducing the graph: 1 graph tried", "writing"),
    }.items():
        terminal.seek(0)
        terminal.truncate(0)
        assert run(command.split()) == ("branching" in command or "lacking" in command)
        for stage in stages:
            assert any(f"{stage} ..." in line for line in lines(terminal)), (command, stage)
