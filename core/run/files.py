"""Files that appear complete or not at all.

A file is written under a hidden name in its folder, and takes its own name by ``os.replace``. The process that writes it holds a
lock of the system on it, so that a file left by a killed process is recognised by its free lock, and removed by the next process
that writes into the folder.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows has no fcntl: files of killed processes stay there
    fcntl = None  # type: ignore[assignment]

_PREFIX, _SUFFIX = ".onnxplug-", ".tmp"


@contextlib.contextmanager
def staged(path: Path) -> Iterator[IO[bytes]]:
    """A new file under a hidden name in the folder of ``path``; it is removed at the end unless it has another name by then."""
    file = staged_file(path)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            if _is_at(file, file.name):
                os.unlink(file.name)
        with contextlib.suppress(OSError):
            file.close()


def staged_file(path: Path) -> IO[bytes]:
    """A new file under a hidden name in the folder of ``path``, locked until it is closed; removes files of killed processes."""
    remove_leftovers(path)
    while True:
        file = open(path.parent / f"{_prefix(path)}{secrets.token_hex(6)}{_SUFFIX}", "xb")  # noqa: SIM115 - closed by the caller
        is_ours = True
        try:
            _lock(file)
        except BlockingIOError:  # another process takes it for a leftover, and removes it
            is_ours = False
        except OSError:  # a file system without locks: nobody takes it for a leftover
            pass
        if is_ours and _is_at(file, file.name):
            return file
        file.close()


def remove_leftovers(path: Path) -> bool:
    """Removes the hidden files of killed processes for ``path``; returns whether a process or thread may be writing ``path``."""
    is_busy = False
    for leftover in path.parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            with open(leftover, "rb") as file:
                _lock(file)
                os.unlink(leftover)
        except FileNotFoundError:
            continue
        except OSError:
            is_busy |= leftover.name.startswith(_prefix(path))
    return is_busy


def _prefix(path: Path) -> str:
    return f"{_PREFIX}{zlib.crc32(os.fsencode(path.name)):08x}-"


def _lock(file: IO[bytes]) -> None:
    if fcntl is not None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(file: IO[bytes], path: str | Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file: complete, or it stays as it was.

    Args:
        path: The file; a symbolic link stays, and its target is replaced.
        write: Writes its content to a file object.

    Raises:
        OSError: It can't be written; or it exists and is not a regular file, a device for example, which stays.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with staged(path) as file:
        write(file)
        file.flush()
        os.replace(file.name, path)


def write_by_torch(path: Path, save: Callable[[Any], Any]) -> None:
    """As :func:`write_whole`, by ``torch.save`` or ``torch.export.save``, which end the process when a write fails within them.

    Args:
        path: The file.
        save: Writes its content to a file object.

    Raises:
        OSError: It can't be written.
    """

    def write(file: IO[bytes]) -> None:
        stream = _Held(file)
        save(stream)
        if stream.error is not None:
            raise stream.error

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
