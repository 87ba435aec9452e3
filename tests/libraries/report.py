"""``make libraries``: the exports of other libraries, each with three exporters, in processes of their own with a time limit.

Outcomes are kept in ``out/libraries/NAME``, and ``docs/libraries.md`` is written from all that are there. What is there is not
measured again without ``--again``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.libraries.rows import LIBRARIES, Library
from tests.libraries.ways import WAYS

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out/libraries"
PAGE = ROOT / "docs/libraries.md"
#: Time limits of a test, and of a process, which runs all the tests of a library with one exporter.
SECONDS_OF_TEST, SECONDS_OF_PROCESS = 240, 3600
#: Build backends that pip needs to download source distributions.
BACKENDS = (
    "hatchling",
    "pdm-backend",
    "flit_core",
    "poetry-core",
    "setuptools",
    "setuptools-scm",
    "wheel",
    "versioneer",
)
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test with one exporter.

    Attributes:
        outcome: ``passed``, ``failed``, ``skipped``, or ``ended`` where the process ended first.
        exports: The number of exports that the test asked for.
        reason: The message of a failure.
    """

    outcome: str
    exports: int
    reason: str


def fetch(library: Library) -> Path:
    """The folder of a library's unpacked source distribution; its further projects lie in ``packages`` beside it."""
    folder = OUT / library.name
    source = folder / f"source-{library.version}"
    if source.is_dir():
        return source
    shutil.rmtree(folder, ignore_errors=True)
    backends = OUT / "backends"
    if not backends.is_dir():
        subprocess.run([*_PIP, "install", "-qq", "--target", str(backends), *BACKENDS], check=True)
    environment = {**os.environ, "PYTHONPATH": str(backends)}
    requested = ["--no-deps", "--no-build-isolation", "--no-binary", library.name, f"{library.name}=={library.version}"]
    subprocess.run([*_PIP, "download", "-qq", "-d", str(folder), *requested], check=True, env=environment)
    if library.needs:
        target = ["--target", str(folder / "packages"), "--prefer-binary"]
        subprocess.run([*_PIP, "install", "-qq", "--no-deps", *target, *library.needs], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    unpacked.rename(source)
    return source


def measure(library: Library, way: str) -> None:
    """Runs the tests of a library's exports with one exporter, and keeps the outcomes."""
    source = fetch(library)
    folder = OUT / library.name
    outcomes = _file(library, way)
    outcomes.unlink(missing_ok=True)
    path = [source / library.folder, folder / "packages", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(entry) for entry in path if str(entry))}
    command = [sys.executable, "-m", "tests.libraries.ways", way, str(outcomes)]
    options = ["-q", "-c", os.devnull, "--timeout", str(SECONDS_OF_TEST), "-p", "no:cacheprovider"]
    options += ["--basetemp", str(folder / "files"), "--import-mode", "importlib"]
    with (folder / f"{way}.log").open("w", encoding="utf-8") as log:
        for root, tests, chosen in (
            (source, library.tests, ["-k", library.chosen]),
            (library.calls.parent, (str(library.calls),) if library.calls.exists() else (), []),
        ):
            if not tests:
                continue
            arguments = [str(root), *options, "--rootdir", str(root), "--confcutdir", str(root), *chosen, *tests]
            try:
                subprocess.run(
                    [*command, *arguments],
                    cwd=ROOT,
                    env=environment,
                    timeout=SECONDS_OF_PROCESS,
                    stdout=log,
                    stderr=log,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                log.write(f"\nended after {SECONDS_OF_PROCESS} s\n")


def _file(library: Library, way: str) -> Path:
    return OUT / library.name / f"{way}.jsonl"


def read(file: Path) -> dict[str, Outcome]:
    """The outcomes in a file, by test: any line replaces ``ended``, and ``failed`` replaces any line."""
    results = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = row.pop("test")
        if name not in results or results[name].outcome == "ended" or row["outcome"] == "failed":
            results[name] = Outcome(**row)
    return results


def exporting(outcomes: dict[str, dict[str, Outcome]]) -> dict[str, dict[str, Outcome]]:
    """The tests that ask for an export in some way, with their outcomes by way."""
    absent = Outcome("absent", 0, "its process ended before it")
    names = dict.fromkeys(name for of_way in outcomes.values() for name in of_way)
    rows = {name: {way: outcomes[way].get(name, absent) for way in outcomes} for name in names}
    return {name: row for name, row in rows.items() if any(outcome.exports for outcome in row.values())}


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated libraries")
    parser.add_argument("--way", action="append", choices=WAYS, default=[])
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [library.name for library in LIBRARIES]
    for library in LIBRARIES:
        for way in options.way or WAYS:
            if library.name in names and (options.again or not _file(library, way).is_file()):
                print(f"{library.name} {library.version}, {way}", flush=True)
                measure(library, way)
    from tests.libraries.page import render

    PAGE.write_text(render({library: outcomes_of(library) for library in LIBRARIES}), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def outcomes_of(library: Library) -> dict[str, dict[str, Outcome]]:
    """The outcomes that are kept, by way and test; empty where a way was not measured."""
    files = {way: _file(library, way) for way in WAYS}
    return {way: read(file) for way, file in files.items()} if all(file.is_file() for file in files.values()) else {}


if __name__ == "__main__":
    main()
