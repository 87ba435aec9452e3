"""Files that appear whole under their name, or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxplug.run import files
from onnxplug.run.files import write_by_torch, write_whole

PROGRAM = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
WRITERS: dict[str, tuple[Callable[[Any], Any], Callable[[Path], Any]]] = {
    "torch.save": (lambda file: torch.save(torch.ones(3), file), torch.load),
    "torch.export.save": (lambda file: torch.export.save(PROGRAM, file), torch.export.load),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_torch_are_read_again(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write, read = WRITERS[name]
    path = tmp_path / "a.pt2"
    write_by_torch(path, write)
    read(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt2"]
    assert "Expect archive file" not in caplog.text


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_write_of_torch_that_fails(name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is raised within torch's writer ends the process: here it is raised after the writer."""
    path = tmp_path / "a.pt2"
    path.write_bytes(b"before")

    class Full(io.FileIO):
        writes = 0

        def write(self, content: Any) -> int:
            Full.writes += 1
            if Full.writes > number:
                raise OSError(28, "No space left on device")
            return super().write(content)

    def full(path: Path) -> io.FileIO:
        file = begun(path)
        file.close()
        return Full(file.name, "wb")

    begun = files.staged_file
    monkeypatch.setattr(files, "staged_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_by_torch(path, WRITERS[name][0])
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt2"]


def test_a_writer_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError):
        write_whole(path, lambda file: file.write(b"new") and 1 / 0)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
