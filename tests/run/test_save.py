"""Saving: complete or not at all, and the old model whole whatever happens."""

from __future__ import annotations

import errno
import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnxplug
from onnxplug import SaveError
from onnxplug.run import save
from tests.support.child import run_child


def program(value: float) -> onnxplug.OnnxProgram:
    model = torch.nn.Linear(32, 32)
    torch.nn.init.constant_(model.weight, value)
    return onnxplug.to_onnx(model.eval(), (torch.randn(1, 32),))


@pytest.fixture(scope="module")
def programs() -> tuple[onnxplug.OnnxProgram, onnxplug.OnnxProgram]:
    return program(1.0), program(2.0)


def weight(path: Path) -> float:
    model = onnx.load(path)
    array = onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "weight"))
    assert np.all(array == array.flat[0]), "a mixture"
    return float(array.flat[0])


@pytest.mark.parametrize("external", [False, True])
def test_saves_and_replaces(tmp_path: Path, programs: Any, external: bool) -> None:
    path = tmp_path / "model.onnx"
    for number, one in enumerate((*programs, programs[0]), start=1):
        one.save(path, external_data=external)
        assert weight(path) == (1.0 if number != 2 else 2.0)
        assert len(list(tmp_path.iterdir())) == (2 if external else 1), "older data files and staging are gone"
    session_input = {"input": np.ones((1, 32), np.float32)}
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    assert session.run(None, {session.get_inputs()[0].name: session_input["input"]})[0].shape == (1, 32)


def test_from_external_to_single_file(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=True)
    programs[1].save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert weight(path) == 2.0


def test_large_models_go_external_by_themselves(tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "LARGE_MODEL_BYTES", 1000)
    programs[0].save(tmp_path / "model.onnx")
    assert len(list(tmp_path.glob("model.onnx.*.data"))) == 1


def test_to_a_file_object(programs: Any) -> None:
    buffer = io.BytesIO()
    programs[0].save(buffer)
    assert onnx.load_from_string(buffer.getvalue()).graph.node[0].op_type == "Gemm"


def test_weights_as_inputs_or_left_out(tmp_path: Path, programs: Any) -> None:
    programs[0].save(tmp_path / "a.onnx", keep_initializers_as_inputs=True)
    assert len(onnx.load(tmp_path / "a.onnx").graph.input) == 3
    programs[0].save(tmp_path / "b.onnx", include_initializers=False)
    assert not onnx.load(tmp_path / "b.onnx").graph.initializer
    assert programs[0](torch.randn(1, 32))[0].shape == (1, 32), "the program itself keeps its weights"


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("step", ["os.fsync", "os.replace", "builtins.open"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()],
)
def test_a_failure_at_any_step_leaves_the_old_model(
    tmp_path: Path,
    programs: Any,
    monkeypatch: pytest.MonkeyPatch,
    external: bool,
    step: str,
    call: int,
    error: BaseException,
) -> None:
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=external)
    before = sorted(p.name for p in tmp_path.iterdir())
    original: Any = {"os.fsync": os.fsync, "os.replace": os.replace, "builtins.open": open}[step]
    seen = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if step != "builtins.open" or "w" in str(kwargs.get("mode", args[1] if len(args) > 1 else "")):
            seen += 1
            if seen == call:
                raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(step, failing)
    raised: BaseException | None = None
    try:
        programs[1].save(path, external_data=external)
    except (SaveError, KeyboardInterrupt) as caught:
        raised = caught
    assert raised is None or isinstance(error, KeyboardInterrupt) or "model.onnx" in str(raised)
    monkeypatch.undo()
    assert weight(path) in (1.0, 2.0), "loads, and is no mixture"
    if raised is not None and not (step == "os.fsync" and weight(path) == 2.0):
        assert weight(path) == 1.0
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_midway(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=True)
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.run.test_save import program
os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
program(2.0).save({str(path)!r}, external_data=True)
"""
    done = run_child("-c", code)
    assert done.returncode == -signal.SIGKILL
    assert weight(path) == 1.0


@pytest.mark.parametrize(
    ("place", "message"),
    [("nowhere/model.onnx", "no folder"), (".", "it is a folder"), ("file/model.onnx", "no folder")],
)
def test_places_that_cannot_be_written(tmp_path: Path, programs: Any, place: str, message: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(SaveError, match=message):
        programs[0].save(tmp_path / place)


def test_a_full_disk_is_seen_before_writing(tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(SaveError, match="MB free"):
        programs[0].save(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
