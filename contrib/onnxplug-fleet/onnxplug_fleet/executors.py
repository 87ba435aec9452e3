"""Executors of jobs: in processes of this machine, or by Ray in processes of a cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug_fleet.manifest import Job
from onnxplug_fleet.process import attempt


class Executor(Protocol):
    """Does jobs."""

    def results(self, jobs: Sequence[Job], store: str) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Each job with its result, in the order in which the jobs end."""


class Processes:
    """Jobs in processes of this machine."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def results(self, jobs: Sequence[Job], store: str) -> Iterator[tuple[Job, dict[str, Any]]]:
        """See :class:`Executor`. An exception within the loop, Ctrl-C too, ends the processes that are at work."""
        stop = threading.Event()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="fleet") as threads:
            futures = {threads.submit(attempt, job, store, stop.is_set): job for job in jobs}
            try:
                yield from _as_they_end(futures)
            finally:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)


class Here:
    """Jobs in this process, one after the other, without limits: for debuggers, and for stores in memory."""

    def results(self, jobs: Sequence[Job], store: str) -> Iterator[tuple[Job, dict[str, Any]]]:
        """See :class:`Executor`."""
        from onnxplug_fleet.job import execute

        for job in jobs:
            with TemporaryDirectory(prefix="onnxplug-fleet-") as scratch:
                yield job, {**execute(job, store, Path(scratch), fresh=False), "attempts": 1}


class Ray:
    """Jobs on the nodes of a Ray cluster, each in a process of its own there.

    A job whose node dies is done on another node. Every node must have the manifest's folder and its packages, and
    reach the store.

    Args:
        address: ``"ray"`` for the cluster that ``RAY_ADDRESS`` names, else a local one; or ``"ray://HOST:PORT"``, or the
            ``"HOST:PORT"`` of a node.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("--on ray needs Ray", hint="pip install 'onnxplug-fleet[ray]'") from None
        self._ray: Any = ray
        if not ray.is_initialized():
            known = {} if address == "ray" else {"address": address}
            try:
                ray.init(**known, log_to_driver=False, logging_level="ERROR")
            except Exception as error:
                raise OnnxplugError(f"Ray can't be reached at {address}: {error}") from error

    def results(self, jobs: Sequence[Job], store: str) -> Iterator[tuple[Job, dict[str, Any]]]:
        """See :class:`Executor`."""
        remote = self._ray.remote(num_cpus=1, max_retries=3)(attempt)
        tasks = {remote.remote(job, store): job for job in jobs}
        waiting = list(tasks)
        try:
            while waiting:
                (done, *_), waiting = self._ray.wait(waiting, num_returns=1)
                yield tasks[done], self._result(done)
        finally:
            for task in waiting:
                with contextlib.suppress(Exception):
                    self._ray.cancel(task, force=True)

    def _result(self, task: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = self._ray.get(task)
        except Exception as error:  # the node of every try has died
            return {
                "status": "killed",
                "error": str(error).strip().splitlines()[0],
                "parts": {},
                "late": {},
                "seconds": 0.0,
            }
        return result


def executor_for(on: str | None, workers: int) -> Executor:
    """The executor that ``--on`` and ``--workers`` name.

    Args:
        on: ``None`` for this machine; ``"ray"`` or ``"ray://HOST:PORT"`` for a Ray cluster.
        workers: Processes at the same time; 0 does the jobs in this process.

    Raises:
        UsageError: ``on`` is none of these.
    """
    if on is None:
        return Processes(workers) if workers else Here()
    if on == "ray" or on.startswith("ray://"):
        return Ray(on)
    raise UsageError(f"--on {on!r} can't be read", hint="Write ray, or ray://HOST:PORT.")


def _as_they_end(futures: dict[Future[dict[str, Any]], Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    for future in as_completed(futures):
        yield futures[future], future.result()
