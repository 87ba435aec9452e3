"""Files and texts that ``report``, ``profile``, ``verbose`` and ``dump_exported_program`` give beside the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.report.observer import ReportWarning
from onnxplug_torch_onnx.request import ExportWarning

import onnxplug
from onnxplug import MissingRuleError, SaveError
from tests.support.torch_onnx_calls import Capped, X, files, net
from tests.support.trace_events import check_trace


def test_report_program_and_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    onnxplug.export(
        model,
        (X,),
        "m.onnx",
        report=True,
        profile=True,
        verify=True,
        dump_exported_program=True,
        artifacts_dir="deep/folder",
        external_data=False,
    )
    written = sorted((folder / "deep" / "folder").iterdir(), key=lambda path: (path.suffix, path.name))
    assert [path.suffix for path in written] == [".html", ".json", ".json", ".md", ".pt2", ".sarif"]
    _, profile, _, report, stored, _ = written
    text = report.read_text(encoding="utf-8")
    assert report.name.startswith("onnx_export_")
    assert report.name.endswith("_success.md")
    for part in ("verification: the same as PyTorch", "| x | float[2, 4] |", "| Gemm | 1 |", "torch.ops.aten.linear"):
        assert part in text
    torch.testing.assert_close(torch.export.load(stored).module()(X), model(X))
    assert capsys.readouterr().out == ""
    check_trace(json.loads(profile.read_text(encoding="utf-8")))
    assert f"In `{profile.name}`" in text
    assert "    torch.export.export" in text  # the table of the profile


def test_profile_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = onnxplug.export(net(), (X,), "m.onnx", profile=True, verify=True)
    assert program is not None
    assert program.profile is not None
    (stage,) = program.profile.stages()
    assert (stage.name, [part.name for part in stage.parts]) == ("torch.onnx.export", ["export", "saving"])
    assert str(program.profile) in capsys.readouterr().out
    assert files(folder) == ["m.onnx"]
    with pytest.raises(MissingRuleError) as caught:
        onnxplug.export(Capped(), (X,), "m.onnx", profile=True)
    assert str(caught.value.profile) in capsys.readouterr().out
    assert "MissingRuleError" in str(caught.value.profile)


def test_report_of_a_failure(folder: Path) -> None:
    with pytest.raises(MissingRuleError) as caught:
        onnxplug.export(Capped(), (X,), "m.onnx", report=True, dump_exported_program=True)
    names = files(folder)
    assert [name.rpartition("_")[2] for name in names if name.endswith(".md")] == ["conversion.md"]
    assert any(name.endswith(".pt2") for name in names)
    assert "m.onnx" not in names
    (report,) = folder.glob("*.md")
    assert "inplace::cap" in report.read_text(encoding="utf-8")
    assert report.name in str(caught.value.__notes__)


def test_a_report_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("onnxplug_tools.report.files.flush", full)
    with pytest.raises(SaveError, match=r"can't write .*success\.md: no room"):
        onnxplug.export(net(), (X,), report=True)
    with pytest.warns(ReportWarning, match="no room"), pytest.raises(MissingRuleError):
        onnxplug.export(Capped(), (X,), report=True)
    assert files(folder) == []
    assert os.listdir(folder) == []


def test_nothing_is_printed_without_verbose(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnxplug.export(net(), (X,), "m.onnx")
    assert capfd.readouterr().out == ""
    assert files(folder) == ["m.onnx"]
    onnxplug.export(net(), (X,), "m.onnx", verbose=True)
    printed = capfd.readouterr().out
    assert "[onnxplug] capture ..." in printed
    assert "OnnxProgram(ai.onnx 21" in printed


def test_a_captured_program_that_cannot_be_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(program: Any, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("no room")

    monkeypatch.setattr(torch.export, "save", fails)
    with pytest.warns(ExportWarning, match="can't be stored in .*no room"):
        onnxplug.export(net(), (X,), "m.onnx", dump_exported_program=True, external_data=False)
    assert files(folder) == ["m.onnx"]
    assert os.listdir(folder) == ["m.onnx"]
