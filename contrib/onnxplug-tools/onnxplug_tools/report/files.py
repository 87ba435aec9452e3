"""Files of reports: written completely or not at all, also where the export failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from onnxplug.errors import OnnxplugError, SaveError
from onnxplug.run.data_files import data_files
from onnxplug.run.files import flush, flush_folder, write_whole
from onnxplug_tools.folders import folder_path
from onnxplug_tools.report.record import File

#: The formats of a report, by the suffixes of the files.
FORMATS = ("json", "sarif", "md", "html")


def file_of(path: str) -> File:
    """A model's file with its size, the data beside it included."""
    size = os.path.getsize(path)
    with contextlib.suppress(OSError):
        folder = Path(path).resolve().parent
        size += sum((folder / name).stat().st_size for name in data_files(Path(path)))
    return File(path, size)


def prepare(folder: str | os.PathLike[str]) -> Path:
    """Makes the folder, and checks that reports can be written there, before anything that takes long."""
    path = folder_path("folder", folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"no report can be written to {path}, which is no folder that can be made: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise SaveError(f"no report can be written to {path}: no permission to write there")
    return path


def write_all(folder: Path, name: str, texts: Mapping[str, Callable[[], str]]) -> list[str]:
    """Writes a report in several formats. Every file that can be written is written before the first error is raised.

    Args:
        name: The name of the files, without their suffixes.

    Returns:
        The paths of the files.
    """
    written: list[str] = []
    failures: list[Exception] = []
    for suffix, text in texts.items():
        path = folder / f"{name}.{suffix}"
        try:
            write(path, text())
        except Exception as error:
            failures.append(error)
        else:
            written.append(str(path))
    if failures:
        first = failures[0]
        if isinstance(first, OnnxplugError):
            raise first
        raise SaveError(f"the report can't be written to {folder}: {type(first).__name__}: {first}") from first
    return written


def write(path: Path, text: str) -> None:
    """Writes a file: complete or not at all."""

    def content(file: IO[bytes]) -> None:
        file.write(text.encode("utf-8"))
        flush(file)

    try:
        write_whole(path, content)
        flush_folder(path.parent)
    except OSError as error:
        raise SaveError(f"can't write {path}: {error}") from error
