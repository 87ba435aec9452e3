"""Files that appear complete or not at all: written under a hidden name in their folder, they take their own by ``os.replace``."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

_PREFIX, _SUFFIX = ".onnxplug-", ".tmp"
#: Seconds after which a file that nobody has written belongs to a process that was killed.
_ABANDONED = 24 * 3600


@contextlib.contextmanager
def staged(path: Path) -> Iterator[IO[bytes]]:
    """A new file under a hidden name in the folder of ``path``; it is removed at the end unless it has another name by then."""
    for leftover in path.parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if is_abandoned(leftover):
                os.unlink(leftover)
    file = staged_file(path)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            if os.path.lexists(file.name):
                os.unlink(file.name)
        with contextlib.suppress(OSError):
            file.close()


def staged_file(path: Path) -> IO[bytes]:
    """A new file under a hidden name in the folder of ``path``."""
    return open(path.parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}", "xb")


def is_abandoned(path: str | Path) -> bool:
    """Whether nobody has written a file for a day."""
    return time.time() - os.stat(path, follow_symlinks=False).st_mtime > _ABANDONED


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
