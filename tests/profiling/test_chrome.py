"""The trace file: every event as the Trace Event Format describes it, nested as speedscope and Perfetto need it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import SaveError
from onnxplug.observers import KINDS, span
from onnxplug.profiling.observer import recording
from onnxplug.profiling.profile import Profile

#: Of the Trace Event Format, for the phases that are used: key to its type. All are required.
EVENTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {
        "name": str,
        "cat": str,
        "ph": str,
        "ts": (int, float),
        "dur": (int, float),
        "pid": int,
        "tid": int,
        "args": dict,
    },
    "M": {"name": str, "ph": str, "ts": (int, float), "pid": int, "tid": int, "args": dict},
}


def check_trace(found: Any) -> list[dict[str, Any]]:
    """Holds an object to the format; returns its complete events."""
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    complete = []
    for event in found["traceEvents"]:
        fields = EVENTS[event["ph"]]
        assert event.keys() == fields.keys()
        for key, kind in fields.items():
            assert isinstance(event[key], kind), (key, event)
            assert not isinstance(event[key], bool)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"] in KINDS
            complete.append(event)
    # One thread's events lie within each other or apart: sorted by their beginning, each ends before the open one does.
    assert len({(event["pid"], event["tid"]) for event in complete}) <= 1
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    ends: list[float] = []
    for event in complete:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 1e-3, event  # times are in microseconds, measured in nanoseconds
        ends.append(end)
    return complete


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


def test_what_lasts_still_ends_now() -> None:
    from onnxplug.profiling.chrome import trace

    with recording() as recorder, span("export"):
        (event,) = check_trace(json.loads(json.dumps(trace(Profile(recorder)))))
        assert event["dur"] > 0


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


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "p.json")
    with recording() as recorder:
        pass
    Profile(recorder).save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert stat.S_ISREG((tmp_path / "p.json").lstat().st_mode)
