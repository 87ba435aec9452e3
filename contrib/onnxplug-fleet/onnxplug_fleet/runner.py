"""A run: every job of a manifest that is not done, its results in the state, and the run's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxplug_fleet.executors import Executor
from onnxplug_fleet.identity import changes, is_outdated
from onnxplug_fleet.manifest import Manifest
from onnxplug_fleet.outputs import write_outputs
from onnxplug_fleet.state import Run, State
from onnxplug_fleet.store import Store

#: A function of a job's name and result, the number of jobs that are done, and the number of all jobs.
JobEnded = Callable[[str, dict[str, Any], int, int], None]
#: The statuses that are no failure.
FINE = ("exported", "unchanged")


def run_fleet(
    manifest: Manifest, out: Path, executor: Executor, *, store: str | None = None, ended: JobEnded = lambda *_: None
) -> Run:
    """Runs a manifest: goes on with the last run where it was interrupted, else begins a new run.

    Jobs of the interrupted run that are done are done again if a file or a version has changed since.

    Args:
        out: The fleet's folder: its state, and each run's page, ``junit.xml`` and ``fleet.sarif``.
        store: The store's URL; when ``None`` the manifest's, else the folder itself.
    """
    url = store or manifest.store or str(out.absolute())
    state, opened = State(out), Store(url)
    with state.running():
        number, jobs = state.begin(manifest)
        outdated = {
            name
            for name, result in state.run(number).results.items()
            if is_outdated(result, manifest.path.absolute().parent)
        }
        jobs += [job for job in manifest.jobs if job.name in outdated]
        done = len(manifest.jobs) - len(jobs)
        for job, result in executor.results(jobs, url):
            if result["status"] in FINE:
                before = state.parts(number, job.name)
                now = {**result["parts"], **result["late"]}
                result["reasons"] = _reasons(result["status"], before, now)
            state.finish(number, job.name, result)
            done += 1
            ended(job.name, result, done, len(manifest.jobs))
        run = state.run(number)
        write_outputs(run, state.before(number), out / "runs" / str(number), opened)
        state.end(number)
    run = state.run(number)
    state.close()
    return run


def _reasons(status: str, before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Why a job was exported, or which parts differ from the last run's although the store has the export."""
    if status == "unchanged":
        return ["the store has an export of equal contents"] if before is None else changes(before, now)
    return changes(before, now) or ["the store has no export of it any more"]


def is_fine(run: Run) -> bool:
    """Whether every job has its file, and the file is right."""
    return all(result is not None and result["status"] in FINE for result in run.results.values())
