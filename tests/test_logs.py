"""Loggers and ``ONNXPLUG_LOG``: the levels, sources and destinations of messages, and settings that can't be read."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnxplug_tools.logs import parse

import onnxplug
from onnxplug import logs
from onnxplug.capture.quiet import quiet
from onnxplug.plugins.manager import PluginManager, PluginWarning
from onnxplug.plugins.records import Selection
from tests.support.distributions import run_python

X = torch.randn(2, 4)
#: A plugin without hooks.
GOOD = SimpleNamespace()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.linear(x), x)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that sets ``ONNXPLUG_LOG`` and applies it."""

    def use(value: str) -> None:
        monkeypatch.setenv(logs.VARIABLE, value)
        logs.configure()

    yield use
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    logs.configure()
    assert [logging.getLogger(name).level for name in ("onnxplug", *(f"onnxplug.{n}" for n in logs.LOGGERS))] == [0] * (
        1 + len(logs.LOGGERS)
    )


def export(**options: Any) -> Any:
    return onnxplug.to_onnx(Net().eval(), (X,), **options)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    return [
        (record.name.removeprefix("onnxplug."), record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("onnxplug")
    ]


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("debug", {"": 10}),
        (" INFO ", {"": 20}),
        ("capture=debug,rewrite=info", {"capture": 10, "rewrite": 20}),
        ("debug, plugins = off", {"": 10, "plugins": 51}),
        ("onnxplug.save=warning,onnxplug=info", {"save": 30, "": 20}),
    ],
)
def test_values(text: str, levels: dict[str, int]) -> None:
    assert parse(text) == levels


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("debgu", "there is no level 'debgu'; did you mean 'debug'"),
        ("7", "there are debug, info, warning, off"),
        ("captur=debug", "there is no logger 'captur'; did you mean 'capture'"),
        ("capture=", "there is no level ''"),
        ("capture", "there is no level 'capture'"),
        ("=debug", "'=debug' has no name before the ="),
        ("debug,info", "the level of all is given twice"),
        ("save=info,save=debug", "the level of save is given twice"),
        ("a=b=debug", "there is no logger 'a=b'"),
        ("\x1b[2J", "there is no level '\\\\x1b"),
    ],
)
def test_values_that_cannot_be_read_are_warned_of_once(text: str, wrong: str, setting: Any) -> None:
    with pytest.raises(ValueError, match=wrong.replace("[", r"\[") if "\\" not in wrong else "no level"):
        parse(text)
    with pytest.warns(logs.LogSettingWarning, match="ONNXPLUG_LOG=.* is ignored") as caught:
        setting(text)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", logs.LogSettingWarning)
        export()


def test_no_message_without_a_level(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    export()
    assert said(caplog) == []
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("onnxplug").handlers)
    assert capfd.readouterr() == ("", "")


def test_info_is_the_stages_with_their_seconds(setting: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    setting("info")
    export(f=tmp_path / "m.onnx", verify=True)
    lines = said(caplog)
    assert {level for _, level, _ in lines} == {"INFO"}
    # A stage is logged when it ends, its parts before it.
    assert [(name, text.partition(":")[0]) for name, _, text in lines] == [
        ("plugins", "plugins"),
        ("capture", "attempt"),
        ("capture", "capture"),
        ("functionalize", "functionalization"),
        ("convert", "interpretation"),
        ("rewrite", "rewrites"),
        ("finish", "finish"),
        ("convert", "conversion"),
        ("verify", "verification"),
        ("save", "saving"),
    ]
    assert all(" s" in text.partition(": ")[2] for _, _, text in lines)
    assert lines[1][2].endswith("(mode non-strict)")


def test_debug_says_which_rule_and_why(setting: Any, caplog: pytest.LogCaptureFixture) -> None:
    setting("convert=debug")

    def declines(g: Any, node: Any) -> Any:
        raise onnxplug.Decline("not today")

    export(rules=[onnxplug.Rule("aten::linear", declines)])
    lines = [text for name, level, text in said(caplog) if level == "DEBUG"]
    assert {name for name, _, _ in said(caplog)} == {"convert"}
    declined = next(i for i, text in enumerate(lines) if "declined: not today" in text)
    assert lines[declined].startswith(f"aten::linear.default at {__file__}:")
    assert "(linear)" in lines[declined]
    assert "onnxplug.converters.linear:linear of onnxplug: comes after" in lines[declined + 1]
    assert any(text.startswith("aten::mse_loss.default (mse_loss): decomposed by ") for text in lines)


def test_debug_says_why_an_attempt_failed(setting: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else x.flip(0)

    setting("capture=debug")
    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(Branching(), (X,))
    lines = [text for _, level, text in said(caplog) if level == "DEBUG"]
    assert any(text.startswith("attempt 1, non-strict, failed: GuardOnDataDependentSymNode") for text in lines)
    assert "captured again, with other branches on values as selections: a side calls aten.flip.default" in lines


def test_debug_lists_rewrites(setting: Any, caplog: pytest.LogCaptureFixture) -> None:
    setting("rewrite=debug")
    onnxplug.to_onnx(lambda x: torch.where(~(x > 0), x, -x), (X,))
    (line,) = [text for _, level, text in said(caplog) if level == "DEBUG"]
    assert line.startswith("where_of_not replaced Where")


def test_debug_lists_verification_runs_and_saves(
    setting: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    setting("verify=debug,run=debug,save=debug")
    onnxplug.to_onnx(
        torch.nn.Linear(4, 4),
        (X,),
        tmp_path / "m.onnx",
        dynamic_shapes=({0: "batch"},),
        verify=True,
        external_data=True,
    )
    lines = [(name, text) for name, level, text in said(caplog) if level == "DEBUG"]
    assert [name for name, _ in lines] == ["run", *["verify"] * 4, "save"]
    assert lines[0][1].startswith("a session of ONNX Runtime: ")
    assert lines[1][1].startswith("the same at batch=2, on the given inputs: ")
    assert [f"seed {seed}: " in lines[2 + seed][1] for seed in range(3)] == [True] * 3
    assert all(text.endswith("at most, by onnxruntime") for _, text in lines[1:5])
    assert lines[5][1] == f"{tmp_path / 'm.onnx'}: 80 bytes of weights, files beside it: 0"


def test_debug_says_why_the_evaluator_runs_a_model(setting: Any, caplog: pytest.LogCaptureFixture) -> None:
    setting("run=debug")
    program = export()
    program.call_reference(X)
    assert [text for _, _, text in said(caplog)] == ["onnxplug.reference runs the model: it was asked to"]


def test_debug_says_which_plugins_were_loaded(setting: Any, caplog: pytest.LogCaptureFixture) -> None:
    points = [
        EntryPoint("good", "tests.test_logs:GOOD", "onnxplug"),
        EntryPoint("bad", "tests.test_logs:NOTHING", "onnxplug"),
        EntryPoint("out", "tests.test_logs:GOOD", "onnxplug"),
    ]
    manager = PluginManager(Selection(without=("out",)), points)
    setting("plugins=debug")
    with pytest.warns(PluginWarning, match="bad"):
        manager.load()
    said_of = {text.partition(" ")[0]: text for name, _, text in said(caplog) if name == "plugins"}
    assert said_of["good"].endswith("rules: 0")
    assert "loaded" in said_of["good"]
    assert "failed" in said_of["bad"]
    assert said_of["bad"].endswith("has no attribute 'NOTHING'")
    assert said_of["out"].endswith(": left out")


def test_a_logger_set_by_the_program_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("onnxplug.capture").setLevel(logging.INFO)
    try:
        export()
        assert [name for name, _, _ in said(caplog)] == ["capture", "capture"]
    finally:
        logging.getLogger("onnxplug.capture").setLevel(logging.NOTSET)


CODE = """
import logging, sys
import torch, onnxplug
if "basic" in sys.argv: logging.basicConfig(format="MINE %(name)s %(message)s", level=logging.ERROR)
onnxplug.to_onnx(torch.nn.ReLU(), (torch.randn(2),))
"""


def test_lines_on_standard_error(tmp_path: Path) -> None:
    text = run_python(tmp_path, "-c", CODE, ONNXPLUG_LOG="info,plugins=off")
    lines = text.splitlines()
    assert len(lines) == 7
    assert all(" INFO onnxplug." in line for line in lines)
    assert run_python(tmp_path, "-c", CODE, ONNXPLUG_LOG="off") == ""


def test_a_program_with_logging_of_its_own_gets_them_there_alone(tmp_path: Path) -> None:
    lines = run_python(tmp_path, "-c", CODE, "basic", ONNXPLUG_LOG="capture=info").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "MINE onnxplug.capture attempt",
        "MINE onnxplug.capture capture",
    ]


def test_a_wrong_value_does_not_stop_an_import_or_an_export(tmp_path: Path) -> None:
    text = run_python(tmp_path, "-c", CODE, ONNXPLUG_LOG="verbose")
    assert text.count("ONNXPLUG_LOG='verbose' is ignored: there is no level 'verbose'") == 1


def test_torch_alone_is_held_back(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    torchs, others = logging.getLogger("torch.export"), logging.getLogger("of_the_model")
    with quiet():
        torchs.error("no")
        others.error("yes")
        print("of the model", file=sys.stderr)
    torchs.error("again")
    assert [record.message for record in caplog.records if record.name == "of_the_model"] == ["yes"]
    assert not torchs.disabled
    assert capsys.readouterr().err.startswith("of the model")
