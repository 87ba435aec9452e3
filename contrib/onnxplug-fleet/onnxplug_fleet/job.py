"""One job: ``onnxplug export`` of a target, stopped as soon as the store is known to have its result."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxplug.errors import OnnxplugError
from onnxplug.observers import Observer, Span, observed
from onnxplug_fleet.data import module_of, open_data
from onnxplug_fleet.flags import has_own_export
from onnxplug_fleet.identity import Watched, digest, parts_of, values_of
from onnxplug_fleet.manifest import Job
from onnxplug_fleet.metrics import metric_of
from onnxplug_fleet.store import Store
from onnxplug_fleet.text import plain_words

#: The number of runs whose median is the latency, and the seconds after which no further run begins.
_RUNS, _SECONDS = 20, 1.0


class _Unchanged(BaseException):
    """Ends an export whose result the store has already."""


class _Watch(Observer):
    """Computes the key of an export when it begins, and ends the export where the store has its result.

    Attributes:
        parts: The parts of the first export.
        kept: Its result in the store; ``None`` where there is none.
        call: The arguments of the first export.
        programs: The exported programs.
    """

    def __init__(self, job: Job, store: Store, watched: Watched) -> None:
        self._job, self._store, self._watched = job, store, watched
        self.parts: dict[str, str] = {}
        self.kept: dict[str, Any] | None = None
        self.call: Mapping[str, Any] = {}
        self.programs: list[Any] = []

    def begin(self, span: Span) -> None:
        """Looks the first export up in the store; pieces of a model are exports within it."""
        if span.name != "export" or span.subject is None or self.parts:
            return
        from onnxplug.cli.options import registry

        self.call = span.subject[0]
        of_job, modules = _parts_of_job(self._job)
        self.parts = {**of_job, **parts_of(self.call, registry()[1], self._watched, modules)}
        self.kept = self._store.find(self.key)
        if self.kept is not None:
            raise _Unchanged

    def end(self, span: Span) -> None:
        """Keeps the thresholds in a program, which is exported and not saved yet."""
        if span.name == "export" and hasattr(span.result, "statistics"):
            from onnxplug_fleet.verification import keep_thresholds

            self.programs.append(span.result)
            keep_thresholds(span.result, self._job.thresholds)

    @property
    def key(self) -> str:
        """The key of the export."""
        return digest(self.parts)


def _parts_of_job(job: Job) -> tuple[dict[str, str], list[str]]:
    """The parts of a job in the manifest, target, options, thresholds and data, and the modules of its functions."""
    parts = {"target": job.target, **{f"option {name}": str(value) for name, value in job.options.items()}}
    parts |= {f"threshold {name}": str(value) for name, value in job.thresholds.items()}
    if job.data is not None:
        samples = [(s.name, values_of(s.args), values_of(s.kwargs)) for s in _data(job)]
        parts |= {"data": digest(samples), "metrics": ", ".join(job.metrics)}
        for name in job.metrics:
            metric_of(name)  # which loads the file of a function
    return parts, [module_of(name) for name in (job.data or "", *job.metrics) if ":" in name]


def _data(job: Job) -> Any:
    return open_data(job.data, job.samples)


def execute(job: Job, store_url: str, scratch: Path, *, fresh: bool) -> dict[str, Any]:
    """Does a job; a failure is a result too.

    Args:
        scratch: An empty folder for its files.
        fresh: Whether this process does nothing else.

    Returns:
        The result, which JSON can hold: ``status`` is ``exported``, ``unchanged``, ``different`` (data misses a
        threshold) or ``failed``; docs/fleet.md lists the rest.
    """
    started, cpu = time.perf_counter(), time.process_time()
    store = Store(store_url)
    with _in_folder(job.folder):
        import torch

        torch.set_num_threads(job.threads)
        watched = Watched(job.target, [str(scratch), *([store.path("")] if store.is_local else [])], fresh=fresh)
        watch = _Watch(job, store, watched)
        try:
            result = _export(job, store, watch, watched, scratch)
        except Exception as error:
            result = {"status": "failed", **_error(error)}
        if result["status"] in ("failed", "different"):
            result["parts"], result["late"] = watch.parts, result.get("late", {})
            result["object"] = f"failed/{digest([job.name, time.time(), os.getpid()])}"
            with contextlib.suppress(OnnxplugError):
                store.put(result["object"], scratch)
    return {**result, "seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}


@contextlib.contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _export(job: Job, store: Store, watch: _Watch, watched: Watched, scratch: Path) -> dict[str, Any]:
    from onnxplug_tools.report.observer import ReportObserver

    reporter = ReportObserver()
    output = scratch / ("model" if has_own_export(job.target) else "model.onnx")
    command = ["export", job.target, "--output", str(output), *job.arguments]
    try:
        with observed(watch, reporter):
            _run_command(command)
    except _Unchanged:
        kept = watch.kept
        assert kept is not None
        return {**kept, "status": "unchanged"}
    except Exception:
        reporter.report.save(scratch)
        raise
    reports = reporter.reports
    for number, report in enumerate(reports, 1):
        report.save(scratch, name="report" if number == 1 else f"report-{number}")
    files = sorted(path for path in scratch.rglob("*.onnx"))
    result = {
        "status": "exported",
        "key": watch.key,
        "parts": watch.parts,
        "late": {},
        "files": [path.relative_to(scratch).as_posix() for path in files],
        "reports": [f"report{f'-{n}' if n > 1 else ''}.html" for n in range(1, len(reports) + 1)],
        "size": sum(
            p.stat().st_size for p in scratch.rglob("*") if p.is_file() and not p.name.startswith(("report", "log"))
        ),
        **_facts(reports),
        "latency": _latency(watch),
        "data": [],
    }
    if job.data is not None:
        result |= _verified(job, watch, files, scratch)
    result["late"] = {part: value for part, value in watched.files().items() if part not in watch.parts}
    if result["status"] == "exported":
        result["object"] = store.keep(watch.key, result, scratch)
    return result


def _run_command(arguments: list[str]) -> None:
    """Runs ``onnxplug export``; its errors are raised."""
    from onnxplug.cli.app import app
    from onnxplug.cli.options import choice
    from onnxplug.cli.warned import warnings_shown

    choice.reset()
    with warnings_shown():
        app(args=arguments, prog_name="onnxplug", standalone_mode=False)


def _facts(reports: list[Any]) -> dict[str, Any]:
    """The facts of reports that are compared between runs."""
    operators, rules = Counter[str](), Counter[str]()
    differences = []
    for report in reports:
        for node in report.view.nodes if report.view is not None else ():
            operators[node.operator] += 1
            if node.rule:
                rules[f"{node.rule} ({node.package})"] += 1
        if report.verification is not None:
            differences.append(report.verification.max_abs_difference)
    return {
        "nodes": sum(operators.values()),
        "operators": dict(operators.most_common()),
        "rules": dict(sorted(rules.items())),
        "difference": max(differences) if differences else None,
        "warnings": [warned.text for report in reports for warned in report.warnings],
    }


def _latency(watch: _Watch) -> float | None:
    """Seconds of a run of the model on the example inputs; ``None`` for several models, or a model that doesn't run."""
    if len(watch.programs) != 1:
        return None
    program = watch.programs[0]
    captured = program.captured
    if captured is None:
        return None
    times: list[float] = []
    try:
        program(*captured.args, **captured.kwargs)
        while len(times) < _RUNS and sum(times) < _SECONDS:
            started = time.perf_counter()
            program(*captured.args, **captured.kwargs)
            times.append(time.perf_counter() - started)
    except Exception as error:  # the export itself has not failed: verification reports a model that doesn't run
        print(f"no latency: {error}")  # noqa: T201 - into the job's log
        return None
    return statistics.median(times)


def _verified(job: Job, watch: _Watch, files: list[Path], scratch: Path) -> dict[str, Any]:
    """The result of verification on data."""
    from onnxplug_fleet.verification import measure_data

    if len(files) != 1:
        raise OnnxplugError(f"data are for targets of one file; {job.target} has {len(files)}")
    report = measure_data(
        files[0],
        watch.call["model"],
        job.data,
        list(job.metrics),
        thresholds=job.thresholds,
        samples=job.samples,
        save=scratch,
    )
    rows = [{**vars(row), "file": Path(row.file).name if row.file else None} for row in report.measured]
    outcome: dict[str, Any] = {"data": rows, "samples": report.samples}
    if not report.accepted:
        texts = [text.replace(f"{scratch}{os.sep}", "") for text in report.problems()]
        outcome |= {"status": "different", "error": "; ".join(texts), "kind": "VerificationError"}
    return outcome


def _error(error: BaseException) -> dict[str, Any]:
    """The message, hint, class and place of an error."""
    expected = isinstance(error, OnnxplugError)
    if not expected:
        traceback.print_exception(error)
    message = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
    return {
        "error": plain_words(message),
        "hint": getattr(error, "hint", None),
        "kind": type(error).__name__,
        "place": getattr(error, "place", None),
    }
