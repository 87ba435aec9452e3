"""The trace file: every event as the Trace Event Format describes it, nested as speedscope and Perfetto need it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.profiling.observer import recording
from onnxplug_tools.profiling.profile import Profile

import onnxplug
from onnxplug import SaveError, UsageError
from onnxplug.observers import span
from tests.support.trace_events import check_trace


def test_of_an_export(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    program = onnxplug.to_onnx(model, (torch.randn(2, 4),), dynamic_shapes=({0: "batch"},), profile=path)
    events = check_trace(json.loads(path.read_text(encoding="utf-8")))
    assert {event["cat"] for event in events} == {"stage", "module", "node", "rule"}
    (rule,) = (e for e in events if e["cat"] == "rule" and e["name"] == "aten::gelu.default")
    assert rule["args"] == {"rule": "onnxplug.converters.activation:gelu", "package": "onnxplug"}
    assert program.profile is not None
    program.verify()
    program.profile.save(path)
    assert [e["name"] for e in check_trace(json.loads(path.read_text()))][-1] == "verification"
    assert os.listdir(tmp_path) == ["profile.json"]


def test_names_and_values_of_any_kind(tmp_path: Path) -> None:
    with recording() as recorder, span('a "quoted"\n name é', places=[1, 2], shape=torch.Size([2]), error=None):
        pass
    Profile(recorder).save(tmp_path / "p.json")
    (event,) = check_trace(json.loads((tmp_path / "p.json").read_text(encoding="utf-8")))
    assert event["name"] == 'a "quoted"\n name é'
    assert event["args"] == {"places": "[1, 2]", "shape": "torch.Size([2])", "error": None}


def test_an_open_span_ends_now() -> None:
    from onnxplug_tools.profiling.chrome import trace

    with recording() as recorder, span("export"):
        (event,) = check_trace(json.loads(json.dumps(trace(Profile(recorder)))))
        assert event["dur"] > 0


def test_a_path_in_bytes(tmp_path: Path) -> None:
    with recording() as recorder:
        pass
    Profile(recorder).save(os.fsencode(tmp_path / "p.json"))  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["p.json"]
    with pytest.raises(UsageError, match="is the path of a file, got 3"):
        Profile(recorder).save(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["folder", "nowhere", "null byte"])
def test_files_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    path = {"folder": str(tmp_path), "nowhere": str(tmp_path / "no" / "p.json"), "null byte": "a\0b"}[kind]
    with recording() as recorder:
        pass
    with pytest.raises(SaveError, match="can't write the profile"):
        Profile(recorder).save(path)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    path.write_text("before")

    def full(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("onnxplug.run.files.os.replace", full)
    with recording() as recorder:
        pass
    with pytest.raises(SaveError, match="no room"):
        Profile(recorder).save(path)
    assert os.listdir(tmp_path) == ["p.json"]
    assert path.read_text() == "before"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "p.json")
    with recording() as recorder:
        pass
    Profile(recorder).save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert stat.S_ISREG((tmp_path / "p.json").lstat().st_mode)


def test_the_model_is_never_replaced(tmp_path: Path) -> None:
    path, args = tmp_path / "m.onnx", (torch.randn(2, 4),)
    with pytest.raises(SaveError, match="the model is there"):
        onnxplug.to_onnx(torch.nn.ReLU(), args, path, profile=path)
    program = onnxplug.to_onnx(torch.nn.ReLU(), args, profile=True)
    program.save(path)
    content = path.read_bytes()
    with pytest.raises(SaveError, match="the model is there"):
        program.profile.save(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["m.onnx"]
