"""Source files are named relative to their project, never by whole paths."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from onnxplug.capture import project
from onnxplug.capture.project import relative_line, relative_path, relative_trace


@pytest.fixture(autouse=True)
def _forget() -> None:
    for cached in (project.relative_path, project._project_of, project.relative_line, project.relative_trace):
        cached.cache_clear()


@pytest.mark.parametrize("mark", ["pyproject.toml", "setup.py", ".git"])
def test_relative_to_the_project(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    assert relative_path(str(tmp_path / "package" / "models" / "net.py")) == "package/models/net.py"


def test_the_nearest_project_counts(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "pyproject.toml").touch()
    assert relative_path(str(tmp_path / "inner" / "net.py")) == "net.py"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (torch.nn.modules.linear.__file__, "torch/nn/modules/linear.py"),
        (contextlib.__file__, "contextlib.py"),
        ("/somewhere/venv/lib/python3.11/site-packages/acme/net.py", "acme/net.py"),
        ("/usr/lib/python3/dist-packages/acme/net.py", "acme/net.py"),
        ("/nowhere/at/all/net.py", "net.py"),
        ("<string>", "<string>"),
        ("<eval_with_key>.5", "<eval_with_key>"),
    ],
)
def test_files_outside_of_projects(path: str, expected: str) -> None:
    assert relative_path(path) == expected


def test_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative_path(str(tmp_path / "models" / "net.py")) == "models/net.py"
    assert relative_path(os.path.join("..", "net.py")) == "net.py"


def test_relative_to_the_folder_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "source"))
    assert relative_path(str(tmp_path / "source" / "acme" / "net.py")) == "acme/net.py"


def test_lines_and_traces(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").touch()
    file = str(tmp_path / "a" / "net.py")
    assert relative_line(f"{file}:12") == "a/net.py:12"
    trace = f'File "{file}", line 7, in forward\n    return open("/x")\n  File "<eval_with_key>.6", line 1, in forward\n    y'
    assert relative_trace(trace) == trace.replace(file, "a/net.py").replace(">.6", ">")
