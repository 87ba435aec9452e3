"""Files that appear complete or not at all: staged, flushed and locked against other processes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from onnxplug.run.references import folder_references

try:
    import fcntl
except ImportError:  # Windows has no fcntl: processes that save one file are not locked against each other
    fcntl = None  # type: ignore[assignment]

_PREFIX, _SUFFIX = ".onnxplug-", ".tmp"
#: The end of the names of several data files.
_PART = r"-\d{5,}-of-\d{5,}"


def staged_file(folder: Path) -> IO[bytes]:
    """A new file under a name of its own, locked until it is closed. Those that killed processes left are removed."""
    for leftover in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        remove_if(leftover, lambda _: True, timeout=0)
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(6)}{_SUFFIX}"
        file = open(path, "xb")  # noqa: SIM115 - the caller closes it
        if lock(file) and _is_at(file, path):  # else another saver took it for a leftover
            return file
        file.close()


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file: complete, or it stays as it was. What a killed process left beside it is removed.

    Args:
        path: The file; a symbolic link stays one, and its target is replaced.
        write: Writes its content to a file object.

    Raises:
        OSError: It can't be written; something else than a regular file is there, a device for example, which stays.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not _is_plain(path):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    file = staged_file(path.parent)
    staged = Path(file.name)
    try:
        with file:
            write(file)
            file.flush()
            os.replace(staged, path)  # while it is locked: no other process takes it for a leftover
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def write_by_torch(path: Path, save: Callable[[Any], Any]) -> None:
    """As :func:`write_whole`, by ``torch.save`` or ``torch.export.save``. Those end the process when a write fails within them.

    Args:
        path: The file.
        save: Writes its content to a file object.

    Raises:
        OSError: It can't be written.
    """

    def write(file: IO[bytes]) -> None:
        held = _Held(file)
        save(held)
        if held.error is not None:
            raise held.error

    write_whole(path, write)


class _Held(io.RawIOBase):
    """A file whose errors wait until its writer, in C++, is done."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # torch.export.save goes back to the start, from Python, when it is done: an error may be raised here.
        return self._file.seek(offset, whence)

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        if self.error is None:
            try:
                self._file.write(content)
            except OSError as error:
                self.error = error
        return size


def flush(file: IO[bytes]) -> None:
    """Waits until a file's content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Waits until a folder's names are on the disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim_data_file(folder: Path, name: str, taken: Callable[[str], bool], part: str = "") -> IO[bytes]:
    """The first of ``NAME.data``, ``NAME.data.2`` … that no model refers to and that nobody is writing, locked.

    A file that is not there is made, empty. The caller closes it after its model refers to it.

    Args:
        folder: The folder.
        name: The model file's name.
        taken: Whether a name may not be used for another reason.
        part: What stands at the end of the name of one of several files, ``-00001-of-00003``.
    """
    number = 1
    while True:
        path = folder / f"{name}.data{'' if number == 1 else f'.{number}'}{part}"
        number += 1
        if taken(path.name) or _is_no_file(path):
            continue
        created = not path.exists()
        try:
            file = open(path, "x+b" if created else "r+b")  # noqa: SIM115 - the caller closes it
        except (FileExistsError, FileNotFoundError):  # another process saved at the same time
            number -= 1
            continue
        except PermissionError:
            if created:
                raise
            continue
        if not lock(file):
            file.close()
        elif not _is_at(file, path):  # replaced between opening and locking
            file.close()
            number -= 1
        elif _is_read(path, name, created):
            if created:  # the name of a missing file that a model refers to is not used
                path.unlink()
            file.close()
        else:
            return file


def _is_read(data: Path, name: str, created: bool) -> bool:
    references = folder_references(data.parent, name)
    return references.include(data.name) if created else references.may_include(data.name)


def is_data_file(name: str, model: str) -> bool:
    """Whether a file's name is one of those that :func:`claim_data_file` gives."""
    return re.fullmatch(re.escape(model) + rf"\.data(\.\d+)?({_PART})?", name) is not None


def is_part(name: str, model: str) -> bool:
    """Whether a file's name is that of one of several data files of a model."""
    return re.fullmatch(re.escape(model) + rf"\.data(\.\d+)?{_PART}", name) is not None


def remove_if(path: Path, condition: Callable[[Path], bool], timeout: float = 0.2) -> None:
    """Removes a file if a condition holds while it is locked; errors leave it there.

    Args:
        path: The file.
        condition: Whether to remove it.
        timeout: Seconds to wait for another process that writes it.
    """
    with contextlib.suppress(OSError):
        if not _is_plain(path):
            return
        with open(path, "r+b") as file:
            until = time.monotonic() + timeout
            while not lock(file):
                if time.monotonic() > until:
                    return
                time.sleep(0.01)
            if _is_at(file, path) and condition(path):
                path.unlink()


def _is_no_file(path: Path) -> bool:
    """Whether something else than a regular file is there: a folder, a link."""
    try:
        return not _is_plain(path)
    except FileNotFoundError:  # another process may have removed it just now
        return False


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def lock(file: IO[bytes]) -> bool:
    """Takes the file's lock; false if another has it. File systems without locks hold no one off."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
