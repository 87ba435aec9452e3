"""Saving under faults: killed, interrupted, a full disk, failing calls, other processes."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxplug import SaveError
from onnxplug.run import data_files, files, save
from tests.run.saved import age, names, weight

_CODE = {save.__file__, files.__file__, data_files.__file__}


_QUICK = [("killed", True, True), ("full", True, False)]


def interrupted(action: Any, line: int, fault: Any) -> bool:
    """Runs an action, with a fault at the n-th line of the code that saves; returns whether it came there."""
    seen: set[tuple[str, int]] = set()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in _CODE:
            return None
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            if len(seen) == line:
                sys.settrace(None)
                fault()
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return len(seen) >= line


def raising(error: BaseException) -> Any:
    def fault() -> None:
        raise error

    return fault


def step(action: Any, line: int, fault: str) -> bool:
    """Makes an attempt that is killed or raises; returns whether the fault came."""
    if fault == "killed":
        child = os.fork()
        if child == 0:
            os._exit(0 if not interrupted(action, line, lambda: os.kill(os.getpid(), signal.SIGKILL)) else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0 or os.WIFSIGNALED(status), "it failed in another way"
        return os.WIFSIGNALED(status)
    error = OSError(errno.ENOSPC, "No space left on device") if fault == "full" else KeyboardInterrupt()
    try:
        return interrupted(action, line, raising(error))
    except (SaveError, OSError, KeyboardInterrupt):
        return True


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Makes gc.collect() quick: it passes over the objects that exist already."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize(
    ("fault", "before", "after"),
    [
        pytest.param(fault, before, after, marks=[] if (fault, before, after) in _QUICK else [pytest.mark.long])
        for fault in ("killed", "full", "interrupted")
        for before in (False, True)
        for after in (False, True)
    ],
)
def test_a_fault_at_any_line_leaves_a_whole_model(
    tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch, before: bool, after: bool, fault: str
) -> None:
    """The name always leads to the old model or to the new one, each with its own weights; so does a copy."""
    path, backup = tmp_path / "model.onnx", tmp_path / "backup.onnx"
    line, values = 0, set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # whose effect no fault here can show
    while True:
        line += 7 if (fault, before, after) in _QUICK else 1
        for leftover in tmp_path.iterdir():
            leftover.unlink()
        programs[0].save(path, external_data=before)
        shutil.copy(path, backup)
        came = step(lambda: programs[1].save(path, external_data=after), line, fault)
        if fault != "killed":
            gc.collect()  # a traceback keeps files open
        assert weight(path) in (1.0, 2.0)
        assert weight(backup) == 1.0
        values.add(weight(path))
        backup.unlink()
        age(tmp_path)
        programs[0].save(path, external_data=after)
        assert weight(path) == 1.0
        assert not list(tmp_path.glob(".*")), "what the fault left is removed by a later save"
        assert len(names(tmp_path)) == 1 + after
        if not came:
            break
    assert line > 70
    assert values == {1.0, 2.0}


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "os.fchown", "os.chmod", "builtins.open", "os.unlink"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failing_call_leaves_the_old_model_or_the_new_model(
    tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch, external: bool, call: str, number: int
) -> None:
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=external)
    before = names(tmp_path)
    original: Any = {"os": os, "builtins": __import__("builtins")}[call.split(".")[0]].__dict__[call.split(".")[1]]
    seen = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if call != "builtins.open" or "b" not in str(args[1:]) or "x" in args[1]:
            seen += 1
            if seen == number:
                raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(call, failing)
        try:
            programs[1].save(path, external_data=external)
            raised = None
        except SaveError as error:
            raised = error
    assert weight(path) == (1.0 if raised is not None else 2.0)
    if raised is not None:
        assert "the disk is full" in str(raised)
        assert "What was there before is untouched." in str(raised)
        assert names(tmp_path) == before


def test_a_full_disk(tmp_path: Path, programs: Any) -> None:
    """A limit on the size of files, which the system enforces as it does a full disk."""
    import resource

    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=True)
    before = names(tmp_path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for external in (False, True):
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
            try:
                with pytest.raises(SaveError, match="File too large"):
                    programs[1].save(path, external_data=external)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert names(tmp_path) == before
            assert weight(path) == 1.0
    finally:
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.long
def test_order_of_flushes(tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data, the model and its name are on the disk in this order; old data goes last."""
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=True)
    events: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def name(descriptor: int) -> str:
        return "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"

    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(f"flush {name(fd)}"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"put {Path(b).name}"), replace(a, b)))
    monkeypatch.setattr(os, "unlink", lambda p: (events.append(f"remove {Path(p).name}"), unlink(p)))
    programs[1].save(path, external_data=True)
    assert events == [
        *("flush file", "flush file", "flush folder"),
        *("put model.onnx", "flush folder", "remove model.onnx.data"),
    ]
