"""A fault at every write: the old file stays, or the new file is whole; and a later save removes the leftovers."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.injection import FAULTS, FULL, attempt
from tests.faults.kinds import KINDS, NEW, OLD, Kind, pieces, program
from tests.run.saved import age

#: In the default run one of this many points is taken.
EVERY = 5


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    """Makes in advance the programs that every fork needs; a garbage collection in a fork would copy every page."""
    torch.set_num_threads(1)
    for value in (OLD, NEW):
        program(value)
        pieces(value)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _prepared(kind: Kind, folder: Path, before: bool) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    kind.prepare(folder)
    if before:
        kind.write(folder, OLD)


def _points(kind: Kind, folder: Path, before: bool) -> int:
    """The number of points of a write of the new file."""
    _prepared(kind, folder, before)
    message, count = attempt(lambda: kind.write(folder, NEW), None, FULL)
    assert message == "done"
    assert kind.read(folder) == NEW
    return count


def _check(kind: Kind, folder: Path, before: bool, number: int, fault: str) -> str:
    """Writes with a fault, then without; returns the outcome of the write with the fault."""
    _prepared(kind, folder, before)
    message, _ = attempt(lambda: kind.write(folder, NEW), number, fault)
    result = kind.read(folder)
    where = f"{kind.name}, point {number}, {fault}: {message}"
    assert result in ((OLD, NEW) if before else (None, NEW)), where
    if message == "done":  # the end of a save may fail in silence: the model is there
        assert result == NEW or kind.may_drop, where
    elif message != "killed":
        assert message.startswith("SaveError: "), where
    age(folder)
    kind.write(folder, NEW)
    assert kind.read(folder) == NEW, where
    left = [path for path in folder.rglob("*") if path.name.startswith(".")]
    assert left == [], f"{where}: what it left is still there"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) <= kind.files + (2 if kind.name in ("package",) else 0), f"{where}: {files}"
    return message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_fault_at_some_writes(kind: Kind, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    count = _points(kind, folder, True)
    for number in range(1 + len(kind.name) % EVERY, count + 1, EVERY):
        _check(kind, folder, True, number, FAULTS[number % len(FAULTS)])


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False], ids=["over-an-old-one", "anew"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_fault_at_every_write(kind: Kind, tmp_path: Path, before: bool) -> None:
    folder = tmp_path / "folder"
    messages = set()
    for number in range(1, _points(kind, folder, before) + 1):
        for fault in FAULTS:
            messages.add(_check(kind, folder, before, number, fault).partition(":")[0])
    assert {"killed", "SaveError"} <= messages | ({"SaveError"} if kind.may_drop else set())


@pytest.mark.long
def test_there_are_many_points(tmp_path: Path) -> None:
    counts = {kind.name: _points(kind, tmp_path / "folder", True) for kind in KINDS}
    assert sum(counts.values()) >= 150, counts
