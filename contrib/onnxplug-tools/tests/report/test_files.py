"""Files of reports: complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from onnxplug_tools.report.files import prepare, write, write_all

from onnxplug import SaveError, UsageError
from tests.support import reports


def test_files_replace_those_before(tmp_path: Path) -> None:
    report = reports.report()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "report.md").write_text("old")
    written = report.save(tmp_path / "deep")
    assert sorted(written) == sorted(str(path) for path in (tmp_path / "deep").iterdir())
    assert (tmp_path / "deep" / "report.md").read_text(encoding="utf-8") == report.markdown()
    assert report.save(tmp_path, name="other", formats=["json"]) == [str(tmp_path / "other.json")]
    report.save(os.fsencode(tmp_path / "bytes"), formats=["json"])  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "bytes") == ["report.json"]
    with pytest.raises(UsageError, match="folder is the path of a file, got 3"):
        report.save(3)  # type: ignore[arg-type]
    with pytest.raises(SaveError, match="can't be written"):
        report.save("a\0b")


def test_the_old_file_stays_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object) -> None:
        raise OSError("no room")

    (tmp_path / "report.md").write_text("old")
    monkeypatch.setattr("onnxplug_tools.report.files.flush", full)
    with pytest.raises(SaveError, match="no room"):
        write(tmp_path / "report.md", "new")
    assert os.listdir(tmp_path) == ["report.md"]
    assert (tmp_path / "report.md").read_text() == "old"


def test_a_fifo_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.md")
    with pytest.raises(SaveError, match="it is not a regular file"):
        write(tmp_path / "report.md", "new")
    assert (tmp_path / "report.md").is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "report.md").symlink_to("elsewhere.md")
    write(tmp_path / "report.md", "new")
    assert (tmp_path / "report.md").is_symlink()
    assert (tmp_path / "elsewhere.md").read_text() == "new"


def test_formats_beside_a_failed_format_are_written(tmp_path: Path) -> None:
    def broken() -> str:
        raise ZeroDivisionError("a defect")

    with pytest.raises(SaveError, match="ZeroDivisionError: a defect"):
        write_all(tmp_path, "report", {"json": broken, "md": lambda: "text"})
    assert os.listdir(tmp_path) == ["report.md"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SaveError, match="no permission"):
        prepare(tmp_path)
