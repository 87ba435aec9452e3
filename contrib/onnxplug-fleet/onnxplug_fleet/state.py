"""The state of runs, in SQLite: the jobs, and the results of the jobs that are done."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug_fleet.manifest import Job, Manifest

try:
    import fcntl
except ImportError:  # Windows has no fcntl: two runs at the same time are not found there
    fcntl = None  # type: ignore[assignment]

_TABLES = """
CREATE TABLE IF NOT EXISTS runs(
    id INTEGER PRIMARY KEY AUTOINCREMENT, manifest TEXT NOT NULL, digest TEXT NOT NULL, began REAL NOT NULL, ended REAL
);
CREATE TABLE IF NOT EXISTS results(
    run INTEGER NOT NULL REFERENCES runs(id), position INTEGER NOT NULL, name TEXT NOT NULL, job TEXT NOT NULL, result TEXT,
    PRIMARY KEY (run, name)
);
CREATE INDEX IF NOT EXISTS results_by_name ON results(name, run);
"""


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        began, ended: Seconds since the epoch; ``ended`` is ``None`` for a run that was interrupted, or goes on.
        results: Name of a job to its result; ``None`` for a job that is not done.
    """

    number: int
    manifest: str
    began: float
    ended: float | None
    results: Mapping[str, dict[str, Any] | None]

    def counts(self) -> Counter[str]:
        """The number of jobs by status; ``waiting`` for jobs that are not done."""
        return Counter(result["status"] if result is not None else "waiting" for result in self.results.values())


class State:
    """The runs of a fleet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(folder / "fleet.db", timeout=30, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise OnnxplugError(f"the fleet's state in {folder} can't be opened: {error}") from error

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While it lasts, no other process runs this fleet.

        Raises:
            UsageError: Another process runs it.
        """
        with open(self.folder / "lock", "w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    hint = "Wait for it, or give this one a folder of its own: --out DIR."
                    raise UsageError(f"another run in {self.folder} goes on", hint=hint) from None
            yield

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def begin(self, manifest: Manifest) -> tuple[int, list[Job]]:
        """A run and its jobs that are not done: the last run where it was interrupted, else a new run with all jobs."""
        last = self._db.execute("SELECT id, digest, ended FROM runs ORDER BY id DESC LIMIT 1").fetchone()
        if last is not None and last[2] is None and last[1] == manifest.digest:
            rows = self._db.execute("SELECT name FROM results WHERE run = ? AND result IS NULL", (last[0],))
            waiting = {name for (name,) in rows}
            return last[0], [job for job in manifest.jobs if job.name in waiting]
        with self._transaction():
            path = str(manifest.path.absolute())
            insert = "INSERT INTO runs(manifest, digest, began) VALUES (?, ?, ?)"
            number = self._db.execute(insert, (path, manifest.digest, time.time())).lastrowid
            assert number is not None
            values = [(number, i, job.name, json.dumps(dataclasses.asdict(job))) for i, job in enumerate(manifest.jobs)]
            self._db.executemany("INSERT INTO results(run, position, name, job) VALUES (?, ?, ?, ?)", values)
        return number, list(manifest.jobs)

    def finish(self, run: int, name: str, result: Mapping[str, Any]) -> None:
        """Records the result of a job."""
        self._db.execute("UPDATE results SET result = ? WHERE run = ? AND name = ?", (json.dumps(result), run, name))

    def end(self, run: int) -> None:
        """Ends a run."""
        self._db.execute("UPDATE runs SET ended = ? WHERE id = ?", (time.time(), run))

    def parts(self, run: int, name: str) -> dict[str, str] | None:
        """The parts of a job's last file in an earlier run; ``None`` where there is none."""
        rows = self._db.execute(
            "SELECT result FROM results WHERE name = ? AND run < ? AND result IS NOT NULL ORDER BY run DESC",
            (name, run),
        )
        for (text,) in rows:
            result = json.loads(text)
            if result["status"] in ("exported", "unchanged"):
                parts: dict[str, str] = {**result["parts"], **result["late"]}
                return parts
        return None

    def runs(self) -> list[int]:
        """The numbers of all runs."""
        return [number for (number,) in self._db.execute("SELECT id FROM runs ORDER BY id")]

    def run(self, number: int) -> Run:
        """A run by its number.

        Raises:
            UsageError: There is no such run.
        """
        row = self._db.execute("SELECT manifest, began, ended FROM runs WHERE id = ?", (number,)).fetchone()
        if row is None:
            listed = ", ".join(map(str, self.runs()[-10:])) or "none"
            raise UsageError(f"there is no run {number} in {self.folder}", hint=f"The last runs: {listed}.")
        results = self._db.execute("SELECT name, result FROM results WHERE run = ? ORDER BY position", (number,))
        manifest, began, ended = row
        done = {name: None if text is None else json.loads(text) for name, text in results}
        return Run(number, manifest, began, ended, done)

    def before(self, number: int) -> Run | None:
        """The run before a given run; ``None`` for the first."""
        earlier = [other for other in self.runs() if other < number]
        return self.run(earlier[-1]) if earlier else None

    def chosen(self, text: str) -> Run:
        """The run of a text: its number, ``last``, or ``last-1`` for the run before the last.

        Raises:
            UsageError: The text names no run.
        """
        numbers: Sequence[int] = self.runs()
        word, _, back = text.partition("-")
        if word == "last" and (not back or back.isdecimal()):
            position = len(numbers) - 1 - int(back or 0)
            if position < 0:
                raise UsageError(f"{text!r}: there are {len(numbers)} runs in {self.folder}")
            return self.run(numbers[position])
        if not text.isdecimal() or len(text) > 15:
            raise UsageError(f"{text!r} is no run", hint="Write its number, last, or last-1 for the one before.")
        return self.run(int(text))

    def close(self) -> None:
        """Closes the database."""
        self._db.close()
