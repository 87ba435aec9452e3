"""Collects a report while an export runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

import torch

from onnxplug.capture.project import relative_line, relative_path
from onnxplug.errors import UsageError
from onnxplug.observers import Span, events
from onnxplug.verification.differences import ComparedInputs, DifferenceObserver
from onnxplug_tools.profiling.recorder import Recorder
from onnxplug_tools.report.arguments import model_name, summarised
from onnxplug_tools.report.differences import CaseDifference, Histogram
from onnxplug_tools.report.failure import failure_of, first_line
from onnxplug_tools.report.files import prepare
from onnxplug_tools.report.record import (
    Attempt,
    Capture,
    Decomposed,
    Plugin,
    Rewritten,
    SizeCondition,
    Verification,
    Warned,
)
from onnxplug_tools.report.report import ExportReport
from onnxplug_tools.report.times import Times

if TYPE_CHECKING:
    from onnxplug.capture.signature import Captured
    from onnxplug.host import PluginHost
    from onnxplug.program import OnnxProgram

_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
#: torch's decomposition of a whole program.
WHOLE_PROGRAM = "run_decompositions, of the whole program"


#: Writes the reports of exports, mostly of a single export; the error is the error that ended the last export.
Write = Callable[[Sequence[ExportReport], BaseException | None], None]


class ReportWarning(UserWarning):
    """A report can't be written, and the export has failed of another error."""


class ReportObserver(DifferenceObserver):
    """Collects the report of an export; for several exports one after the other, a report of each.

    Args:
        write: The function that writes the reports at the end, if any.

    Attributes:
        reports: The reports so far; the last is the running export's.
    """

    details = True
    describes = True

    def __init__(self, write: Write | None = None) -> None:
        self._recorder = Recorder()
        self.reports: list[ExportReport] = []
        self._write = write
        self._host: PluginHost | None = None
        self._thread = threading.get_ident()
        self._stack = contextlib.ExitStack()
        self._has_ended = False
        self._cases: list[CaseDifference] = []
        self._begin()

    @property
    def report(self) -> ExportReport:
        """The report of the running export."""
        return self.reports[-1]

    def _begin(self) -> None:
        times = Times(self._recorder)
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        system = f"{platform.system()} {platform.machine()}"
        self.reports.append(ExportReport(began=began, versions=_versions(), system=system, times=times))
        times.begin()

    @property
    def _times(self) -> Times:
        times = self.report.times
        assert times is not None
        return times

    # -- events --------------------------------------------------------------------------------------------------------

    def begin(self, span: Span) -> None:
        """Takes the facts at the beginning of a stage."""
        if not self._recorder.spans:
            self._stack.enter_context(self._warnings())
        if span.root is span and not self._has_ended:
            self._join(span)
        self._recorder.begin(span)
        if span.name == "capture" and span.kind == "stage":
            self._selected(span.subject.host)
        elif span.name == "verification" and (report := self._report_of(span)) is not None:
            self.measures, self._cases = True, []
            report.verification = Verification(self._cases)

    def end(self, span: Span) -> None:
        """Takes the result of a stage."""
        if span.kind != "stage":
            return
        if span.name == "verification" and self.measures:
            self._verified(span)
        if span.error is not None or span.result is None:
            return
        if span.name == "plugins":
            self._selected(span.result[1])
        elif span.name == "capture":
            self._captured(span.result)
        elif span.name == "conversion":
            self._exported(span.result)
        elif span.name == "saving" and (report := self._report_of(span)) is not None:
            report.saved(span.result)

    def measure(self, difference: torch.Tensor, allowed: torch.Tensor, same: torch.Tensor) -> Histogram:
        """The histogram of the differences of an output."""
        return Histogram.of(difference, allowed, same)

    def compared(self, inputs: ComparedInputs) -> None:
        """Takes a set of inputs that verification compared."""
        self._cases.append(CaseDifference.of(inputs))

    def finish(self, error: BaseException | None) -> None:
        """Ends and writes the reports; after a failed export, an error of writing is only a note and a warning."""
        self._stack.close()
        self._times.end()
        self._has_ended = True
        if error is None:
            self._settle(None)
            if self._write is not None:
                self._write(self.reports, None)
            return
        try:
            self._settle(error)
            with contextlib.suppress(AttributeError, TypeError):  # an error of a class with a layout of its own
                error.report = self.report  # type: ignore[attr-defined]
            if self._write is not None and isinstance(error, Exception):
                self._write(self.reports, error)
        except Exception as failure:
            text = f"the report of the failed export can't be written: {first_line(failure)}"
            error.add_note(text)
            with contextlib.suppress(Warning):  # made an error by a filter
                warnings.warn(text, ReportWarning, stacklevel=4)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _report_of(self, span: Span) -> ExportReport | None:
        """The report of the program that is a span's subject; ``None`` where it is another observer's."""
        report = getattr(span.subject, "report", None)
        return next((known for known in self.reports if known is report), None)

    def _join(self, span: Span) -> None:
        """An export begins; after another export, it gets a report of its own."""
        if self.report.view is not None:
            self._times.end()
            self._begin()
        if span.subject is not None:
            self._call(*span.subject)

    def _verified(self, span: Span) -> None:
        """Takes the result of verification; the last verification counts."""
        self.measures = False
        verification = span.subject.report.verification
        if span.error is not None:
            verification.error = getattr(span.error, "message", "") or first_line(span.error)
        else:
            verification.skipped = list(span.result.skipped)

    @contextlib.contextmanager
    def _warnings(self) -> Iterator[None]:
        """Notes the warnings that are shown; they are shown all the same."""
        before = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if threading.get_ident() == self._thread:
                warned = Warned(category.__name__, str(message), f"{relative_path(filename)}:{lineno}")
                if warned not in self.report.warnings:
                    self.report.warnings.append(warned)
            before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        try:
            yield
        finally:
            if warnings.showwarning is show:
                warnings.showwarning = before

    def _call(self, arguments: Mapping[str, Any], defaults: Any) -> None:
        """Takes the arguments of the first call, which are the user's where an export calls another."""
        if self.report.model:
            return
        values = dict(arguments)
        self.report.model = model_name(values.pop("model", None))
        self.report.arguments |= summarised(values, defaults)

    def _selected(self, host: PluginHost) -> None:
        """Takes the plugins."""
        self._host = host
        records: Sequence[Any] = getattr(host, "records", list)()
        self.report.plugins = [
            Plugin(r.name, r.distribution, r.version, r.status, (r.error or "").strip().rpartition("\n")[2])
            for r in records
        ]

    def _captured(self, captured: Captured) -> None:
        """Takes the facts about the capture."""
        names = captured.dim_names
        ranges = {
            names.get(str(symbol), str(symbol)): f"{limits.lower} to {_upper(limits.upper)}"
            for symbol, limits in captured.program.range_constraints.items()
        }
        conditions = [(condition, False) for condition in captured.conditions]
        conditions += [(condition, True) for condition in captured.assumptions]
        conditions += [(bound, False) for bound in captured.bounds]
        self.report.capture = Capture(
            captured.strategy,
            captured.seconds,
            len(captured.program.graph.nodes),
            repeated=captured.repeated,
            dimensions=ranges,
            conditions=[
                SizeCondition(c.text(names), None if c.place is None else relative_line(c.place), small)
                for c, small in conditions
            ],
        )

    def _exported(self, program: OnnxProgram) -> None:
        """Takes the program, whose nodes have full metadata about their origin."""
        from onnxplug_tools.inspection.view import view

        report, statistics = self.report, program.statistics
        report.opsets = {name or "ai.onnx": version for name, version in program.model.opset_imports.items()}
        report.take_ends(program.model)
        report.functions = dict(statistics.functions)
        report.packages = dict(statistics.packages)
        report.sizes = _sizes(program)
        report.view = view(program.model, report.sizes)
        self._rewrites(getattr(self._host, "sources_of_rewrites", dict)())
        report.decomposed += [Decomposed(op, WHOLE_PROGRAM, 1, ()) for op in statistics.decomposed]
        program.report = report

    def _rewrites(self, packages: Mapping[str, str]) -> None:
        made = Counter(name for node in self.report.view.nodes for name in node.rewritten) if self.report.view else {}
        self.report.rewrites = [
            Rewritten(row.name, packages.get(row.name, ""), row.fired, made.get(row.name, 0), row.seconds)
            for row in self._times.rewrites()
            if row.fired
        ]

    def _settle(self, error: BaseException | None) -> None:
        """Ends the reports."""
        if error is not None:
            self.report.failure = failure_of(error, self._times.failed_stage() or "arguments")
        for report in self.reports:
            _complete(report)


def _complete(report: ExportReport) -> None:
    """Adds the facts from the recorded times to a report."""
    times = report.times
    if times is not None:
        report.decomposed = [*_decomposed(times), *report.decomposed]
        report.folded = _folded(times)
        attempts = _attempts(times, report.failure.tries if report.failure is not None else ())
        if report.capture is None and attempts:
            report.capture = Capture(seconds=sum(attempt.seconds for attempt in attempts))
        if report.capture is not None:
            report.capture.attempts = attempts


def observer(report: Any) -> ReportObserver | None:
    """The observer that the option ``report`` asks for; ``None`` for ``False``, or where there is an observer already.

    Args:
        report: ``True``, the path of a folder, or a function that writes: it gets the reports of all exports, and the
            error that ended the last.
    """
    if report is False or events().find(ReportObserver) is not None:
        return None
    return ReportObserver(_writer(report))


def _writer(report: Any) -> Write | None:
    if report is True or callable(report):
        return report if callable(report) else None
    if not isinstance(report, str | os.PathLike) or not os.fspath(report):
        raise UsageError(
            f"report= takes True, False or the path of a folder, got {report!r}", hint="report='reports/my_model'"
        )
    folder = prepare(report)

    def write(made: Sequence[ExportReport], error: BaseException | None) -> None:
        for number, report in enumerate(made, 1):
            report.save(folder, name="report" if number == 1 else f"report-{number}")
        if error is not None:
            error.add_note(f"A report is in {folder}.")

    return write


def _versions() -> dict[str, str]:
    import onnxplug

    versions = {"onnxplug": onnxplug.__version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | {"torch": str(torch.__version__)}  # with its build


def _sizes(program: OnnxProgram) -> dict[str, int]:
    """The sizes of the dynamic dimensions in the export's own inputs, by name."""
    captured = program.captured
    if captured is None or not (captured.args or captured.kwargs):
        return {}
    leaves = program.flatten(captured.args, captured.kwargs)
    shapes = {value.name: value.shape for value in program.model.graph.inputs}
    sizes: dict[str, int] = {}
    for slot in program.inputs:
        shape = shapes.get(slot.name)
        leaf = leaves[slot.position] if slot.position is not None else None
        if shape is not None and isinstance(leaf, torch.Tensor):
            # A complex tensor has an axis more in the model.
            for dim, size in zip(shape, leaf.shape, strict=False):
                name = None if isinstance(dim, int) else dim.value
                if name is not None and name.isidentifier():
                    sizes.setdefault(name, int(size))
    return sizes


def _upper(limit: Any) -> str:
    text = str(limit)
    return text if text.isdigit() and int(text) < 2**60 else "any"


def _attempts(times: Times, tries: Sequence[str]) -> list[Attempt]:
    """The attempts at capture; where all failed, ``tries`` has the reason of each."""
    spans = [span for span in times.spans if span.kind == "stage" and span.name == "attempt"]
    attempts = []
    for position, span in enumerate(spans):
        error = span.about.get("error")
        if error is not None:
            reason = tries[position].partition(": ")[2] if position < len(tries) else ""
            error = reason or span.about.get("why") or str(error)
        attempts.append(Attempt(str(span.about.get("mode", "")), span.seconds, error))
    return attempts


def _decomposed(times: Times) -> list[Decomposed]:
    """The operators that torch decomposed one by one, where the trace of the decomposition succeeded."""
    operators: dict[tuple[str, str], list[str]] = {}
    for span in times.spans:
        if span.kind != "decomposition" or "error" in span.about:
            continue
        outer = span.parent
        while outer is not None and outer.kind != "node":
            outer = outer.parent
        place = str(outer.about.get("location") or "") if outer is not None else ""
        operators.setdefault((span.name, str(span.about.get("rule", ""))), []).append(place)
    return [
        Decomposed(op, by, len(places), tuple(dict.fromkeys(relative_line(p) for p in places if p)))
        for (op, by), places in operators.items()
    ]


def _folded(times: Times) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for span in times.spans:
        for (kind, name), total in span.totals.items():
            if kind == "fold" and total.hits:
                counts[name] += total.hits
    return dict(counts.most_common())
