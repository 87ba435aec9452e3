"""Data files that a save was killed at: the next save of the same model to the same path goes on from there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from onnxplug.run.files import flush, lock

#: Bytes of weights from files from which on a save can be resumed; below, it is over before anybody could want it.
RESUMABLE_BYTES = 1 << 26
#: Bytes after which what is written is flushed to the disk, and noted.
SYNC_BYTES = 1 << 28


def _journal(folder: Path, name: str) -> Path:
    return folder / f".onnxplug-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.partial"


class Partial:
    """Data files that grow under names of their own, and the journal of what is in them.

    A tensor counts as written when its bytes are on the disk and a line of the journal says so after that. Only tensors that
    come from files do: those in memory may be others in the next process.

    Attributes:
        files: The data files.
        done: The names of the tensors that need not be written.
    """

    def __init__(self, journal: IO[bytes], path: Path, count: int) -> None:
        self.path = path
        self.files: list[IO[bytes]] = []
        self.done: set[str] = set()
        self._journal = journal
        self._pending: list[str] = []
        self._pending_bytes = 0
        self._count = count

    @classmethod
    def open(
        cls, folder: Path, name: str, plan: Any, ends: Mapping[str, tuple[int, int]], count: int
    ) -> Partial | None:
        """Opens the data files of a save, with what an earlier one of the same plan has written.

        Args:
            folder: The model's folder.
            name: The model file's name.
            plan: What is to be written where, as JSON has it.
            ends: The tensors that may be there already: the number of the file, and the end in it.
            count: The number of files.

        Returns:
            The files; ``None`` where another process writes them.
        """
        path = _journal(folder, name)
        file = open(path, "a+b")  # noqa: SIM115 - closed by close()
        if not lock(file):
            file.close()
            return None
        partial = cls(file, path, count)
        digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
        file.seek(0)
        lines = [line[:-1].decode("utf-8", "replace") for line in file.readlines() if line.endswith(b"\n")]
        noted = set(lines[1:]) if lines[:1] == [digest] else set()
        if not noted:
            partial._remove_data()
            file.truncate(0)
            file.write(f"{digest}\n".encode())
            file.flush()
        for number in range(count):
            data = partial._data(number)
            partial.files.append(open(data, "r+b" if data.exists() else "x+b"))  # noqa: SIM115 - closed by close()
            lock(partial.files[-1])  # also under the name that it is given, until the model refers to it
        sizes = [os.fstat(data.fileno()).st_size for data in partial.files]
        partial.done = {
            tensor for tensor, (number, end) in ends.items() if json.dumps(tensor) in noted and end <= sizes[number]
        }
        return partial

    def _data(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}-{number + 1}")

    def note(self, name: str, length: int) -> None:
        """Counts a tensor as written, with those before it, as soon as there is enough of them."""
        self._pending.append(name)
        self._pending_bytes += length
        if self._pending_bytes >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Flushes the data to the disk, and notes in the journal what is there."""
        for file in self.files:
            flush(file)
        self._journal.write("".join(f"{json.dumps(name)}\n" for name in self._pending).encode())
        self._journal.flush()
        self.done.update(self._pending)
        self._pending, self._pending_bytes = [], 0

    def close(self, *, keep: bool) -> bool:
        """Closes the files, and removes them unless they are to be kept and hold something; whether they are kept."""
        if keep:
            with contextlib.suppress(OSError):
                self.sync()
        keep = keep and bool(self.done)
        for file in self.files:
            with contextlib.suppress(OSError):
                file.close()
        if not keep:
            self._remove_data()
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._journal.close()
        return keep

    def _remove_data(self) -> None:
        for data in self.path.parent.glob(f"{self.path.name}-*"):
            with contextlib.suppress(OSError):
                data.unlink()


def remove_partial(folder: Path, name: str) -> None:
    """Removes what a killed save has left, unless another process is at it."""
    path = _journal(folder, name)
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        if lock(file):
            Partial(file, path, 0).close(keep=False)


def plan_of(
    version: str, places: Mapping[str, Sequence[int]], tensors: Mapping[str, tuple[str, list[int], Any]]
) -> list[Any]:
    """What a save writes where, as JSON has it: equal for saves that write the same bytes.

    Args:
        version: Of onnxplug.
        places: File, offset and length of each tensor.
        tensors: Element type, shape and identity of each tensor.
    """
    return [version, *([name, *places[name], *tensors[name]] for name in places)]
