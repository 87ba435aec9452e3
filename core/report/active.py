"""The report that is being made, if any. Cheap to import: an export that nobody wants a report of loads nothing more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from onnxplug.packages import load

if TYPE_CHECKING:
    from onnxplug.run.report import VerificationReport

_active: ContextVar[Any] = ContextVar("onnxplug_report", default=None)


@contextlib.contextmanager
def reported(
    report: bool | str | os.PathLike[str] | Callable[[Any, BaseException | None], None],
    arguments: Mapping[str, Any] | None = None,
    defaults: Any = None,
) -> Iterator[Any]:
    """Collects a report of an export while the context lasts; joins the one that is being collected already.

    An error that leaves the context has the report as its attribute ``report``, and is raised whether or not that can be
    written.

    Args:
        report: Whether to; the folder that it is written to; or what writes it: it gets the reports of all exports that are made
            while the context lasts, and the error that ended the last.
        arguments: The arguments of the call; the model is the first of them.
        defaults: The function whose defaults they are compared with.

    Yields:
        What the export tells of itself; ``None`` where nobody wants to know.

    Raises:
        UsageError: ``report`` is neither a bool nor the path of a folder.
        SaveError: The folder can't be made, or the report of an export that succeeded can't be written.
        MissingPackageError: The package that makes reports is not installed.
    """
    outer = _active.get()
    if outer is None and report is False:
        yield None
        return
    if outer is not None:
        outer.joined()
        if arguments:
            outer.call(arguments, defaults)
        yield outer
        return
    collect = load("report=")
    write = collect.begun(report)
    collector = collect.Collector()
    with collector.recording():
        if arguments is not None:
            collector.call(arguments, defaults)
        token = _active.set(collector)
        try:
            yield collector
        except BaseException as error:
            _active.reset(token)
            collect.failed(collector, error, write)
            raise
        _active.reset(token)
    collect.ended(collector, write)


@contextlib.contextmanager
def verified(report: Any) -> Iterator[Callable[[VerificationReport], None]]:
    """Has a program's report measure what verification compares while the context lasts.

    Yields:
        What is to be called with what verification found.
    """
    if report is None:
        yield _nothing
        return
    with report.measured() as note:
        yield note


def _nothing(found: VerificationReport) -> None:
    """Takes no note of what verification found."""
