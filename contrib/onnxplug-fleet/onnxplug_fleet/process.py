"""A job in a process of its own, with limits of time and memory; it is tried again when it was killed, not when it failed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from onnxplug_fleet.manifest import Job

#: The seconds between two checks of a process.
_PERIOD = 0.1
_FORKSERVER = "forkserver" in multiprocessing.get_all_start_methods()


def attempt(job: Job, store: str, stopped: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Does a job in a process, as often as its manifest says where the process was killed.

    Args:
        stopped: Whether the run is to end; called at every check.

    Returns:
        The result of :func:`onnxplug_fleet.job.execute`, with ``attempts``; or ``{"status": "killed", "error": …}``.
    """
    result: dict[str, Any] = {}
    for number in range(1, job.retries + 2):
        result = _supervised(job, store, stopped)
        result["attempts"] = number
        if result["status"] != "killed" or stopped():
            break
    return result


def _supervised(job: Job, store: str, stopped: Callable[[], bool]) -> dict[str, Any]:
    context: Any = multiprocessing.get_context("forkserver" if _FORKSERVER else "spawn")
    if _FORKSERVER:
        context.set_forkserver_preload(["onnxplug_fleet.warm"])
    receiver, sender = context.Pipe(duplex=False)
    scratch = Path(tempfile.mkdtemp(prefix="onnxplug-fleet-"))
    process: Any = context.Process(
        target=_child, args=(job, store, str(scratch), sender, dict(os.environ)), name=f"fleet {job.name}"
    )
    started = time.perf_counter()
    try:
        process.start()
        sender.close()
        result = _watched(process, receiver, job, stopped, started)
        if result["status"] == "killed":
            process.kill()
            result |= {"seconds": time.perf_counter() - started, "log": _end_of_log(scratch)}
        process.join()
        return result
    finally:
        receiver.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _watched(
    process: Any, receiver: Connection, job: Job, stopped: Callable[[], bool], started: float
) -> dict[str, Any]:
    """Waits for the result, or for a reason to kill the process."""
    while True:
        ready = wait([receiver, process.sentinel], timeout=_PERIOD)
        if receiver in ready:
            with contextlib.suppress(EOFError, OSError):
                result: dict[str, Any] = receiver.recv()
                return result
        if ready:
            process.join()
            return _killed(_ending(process.exitcode))
        if stopped():
            return _killed("the run was interrupted")
        if time.perf_counter() - started > job.timeout:
            return _killed(f"it took longer than {job.timeout:g} s")
        used = resident_bytes(process.pid)
        if job.memory is not None and used > job.memory:
            return _killed(f"it had {used / 1e6:.0f} MB of memory, {job.memory / 1e6:.0f} MB are allowed")


def _killed(reason: str) -> dict[str, Any]:
    return {"status": "killed", "error": reason, "parts": {}, "late": {}}


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with the status {code} before the job did"


def resident_bytes(pid: int) -> int:
    """The resident memory of a process in bytes; 0 where ``/proc`` does not have it."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _end_of_log(scratch: Path) -> str:
    try:
        return (scratch / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
    except OSError:
        return ""


def _child(job: Job, store: str, scratch: str, sender: Connection, environment: dict[str, str]) -> None:
    """The process: its output goes into the log, and it ends when the runner does.

    Args:
        environment: The runner's environment variables; the server of processes has those of the first run.
    """
    os.environ.clear()
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    log = os.open(os.path.join(scratch, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    _limit_memory(job.memory)
    from onnxplug_fleet.job import execute

    try:
        result = execute(job, store, Path(scratch), fresh=True)
    except MemoryError as error:
        result = {**_killed(f"it ran out of memory: {error}"), "seconds": 0.0}
    sys.stdout.flush()
    sender.send(result)
    sender.close()


def _limit_memory(size: int | None) -> None:
    """Limits the address space of the process where its memory can't be watched from outside."""
    if size is None or os.path.exists("/proc/self/statm"):
        return
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
