"""Counts the writes of a process, and lets one of them fail.

A *point* is a call that changes files: a write, a new file or folder, a flush, a truncation, a new name, a removal.
Bytes that Python buffers are written when Python writes its buffer, as without faults; a kill loses them.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from typing import Any

#: The faults at a point: no room; the process is killed before it, or after half of its bytes are written.
FULL, KILLED, TORN = "full", "killed", "torn"
FAULTS = (FULL, KILLED, TORN)
#: The exit status of a process that was killed.
_STATUS = 77


class Points:
    """The points of one action.

    Args:
        number: The number of the point with the fault, from 1; ``None``: there is no fault.
        fault: One of :data:`FAULTS`.
    """

    def __init__(self, number: int | None, fault: str) -> None:
        self.number = number
        self.fault = fault
        self.seen = 0

    def at(self, half: Callable[[], Any] | None = None) -> None:
        """Counts a point, and does the fault there; ``half`` writes half of the point's bytes."""
        self.seen += 1
        if self.seen != self.number:
            return
        if self.fault == FULL:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.fault == TORN and half is not None:
            half()
        os._exit(_STATUS)


class _File(io.FileIO):
    """A file whose writes are points."""

    points: Points

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self.points.at(lambda: super(_File, self).write(view[: len(view) // 2]))
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self.points.at()
        return super().truncate(size)


_NAMES = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "fsync", "ftruncate", "link", "symlink", "chmod")


def install(points: Points) -> None:
    """Counts the calls of this process, a fork, as points."""
    kind = type("File", (_File,), {"points": points})
    originals = {name: getattr(os, name) for name in _NAMES}
    os_open = os.open

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            points.at()
            return original(*args, **options)

        return call

    for name, original in originals.items():
        setattr(os, name, counted(original))

    def opened(file: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            points.at()
        return os_open(file, flags, *args, **options)

    os.open = opened  # type: ignore[assignment]
    plain = io.open

    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wxa+"):
            return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int) and set(mode) & set("wxa"):
            points.at()
        raw = kind(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)
        text.mode = mode  # type: ignore[misc]
        return text

    builtins.open = open_  # type: ignore[assignment]
    io.open = open_  # type: ignore[assignment]


def attempt(action: Callable[[], Any], number: int | None, fault: str) -> tuple[str, int]:
    """Does an action in a fork, with a fault at a point.

    Returns:
        The outcome (``"done"``, ``"killed"``, or the name of the error and its message), and the number of points; of a
        killed process the number until then.
    """
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(reading)
        points = Points(number, fault)
        text = "done"
        write = os.write
        try:
            install(points)
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        write(writing, f"{points.seen} {text}".encode(errors="replace")[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        printed = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    if status == _STATUS:
        return "killed", number or 0
    assert status == 0, f"the fork ended by {status}"
    count, _, text = printed.partition(" ")
    return text, int(count)
