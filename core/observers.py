"""Observers of an export, and its events: stages with their results and, if an observer wants details, nodes and rules.

An :class:`Observer` is an argument of a call (``to_onnx(observers=[...])``), supplied by a plugin (``onnxplug_observers``), or made
from an option (``report``, ``profile``, ``progress``). Observed code emits events by :func:`stage`, :func:`span` and :func:`step`;
code that runs for each node reads :attr:`Events.details` once, and emits nothing where that is ``None``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from onnxplug import logs

if TYPE_CHECKING:
    from typing import Self

#: The kinds of spans: a stage of an export or a part of one, the trace of a module of the model, the conversion of an FX node,
#: the call of a rule, the decomposition of an operator.
KINDS = ("stage", "module", "node", "rule", "decomposition")
#: The stages of an export, in their order; the last two are optional.
STAGES = ("capture", "conversion", "verification", "saving")
#: The spans of whole exports.
ROOTS = ("export", "torch.onnx.export")


class Span:
    """An action with a beginning and an end.

    ``subject``, ``result`` and ``error`` are removed once all observers have received the end: who keeps spans keeps no models.

    Attributes:
        name: The action.
        kind: One of :data:`KINDS`.
        parent: The span around it; ``None`` for an outermost span.
        subject: Its object: for an export the arguments and the called function, for ``capture`` the plan, for
            ``verification`` and ``saving`` the program, for a rule the call and a function that explains the choice.
        result: The result of a stage, once it has ended: for ``capture`` the capture, for ``conversion`` and an export the
            program, for ``verification`` the report.
        error: The error that ended it.
        start, end: Nanoseconds of ``time.perf_counter_ns``; the end is the present time while it lasts.
        within: Nanoseconds that the spans directly within it took.
        about: More facts about it, by name; they can be written as JSON.
        totals: Counts and times of actions in it that are too short for spans, by kind and name; only for stages.
    """

    __slots__ = (
        "_end",
        "about",
        "error",
        "kind",
        "log",
        "name",
        "parent",
        "result",
        "start",
        "subject",
        "totals",
        "within",
    )

    def __init__(
        self,
        name: str,
        kind: str = "stage",
        parent: Span | None = None,
        about: dict[str, Any] | None = None,
        *,
        subject: Any = None,
        log: logging.Logger | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.parent = parent
        self.about: dict[str, Any] = about if about is not None else {}
        self.subject = subject
        self.log = log
        self.result: Any = None
        self.error: BaseException | None = None
        self.within = 0
        self.totals: dict[tuple[str, str], Total] = {}
        self._end: int | None = None
        self.start = time.perf_counter_ns()

    @property
    def end(self) -> int:
        return time.perf_counter_ns() if self._end is None else self._end

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9

    @property
    def own_seconds(self) -> float:
        """How long it took without the spans within it."""
        return (self.end - self.start - self.within) / 1e9

    def finish(self) -> None:
        """Ends it now."""
        self._end = time.perf_counter_ns()
        if self.parent is not None:
            self.parent.within += self._end - self.start

    @property
    def root(self) -> Span | None:
        """The innermost export around it; itself where it is an export."""
        span: Span | None = self
        while span is not None and span.name not in ROOTS:
            span = span.parent
        return span

    def is_within(self, other: Span) -> bool:
        """Whether it is a given span, or lies within it."""
        span: Span | None = self
        while span is not None:
            if span is other:
                return True
            span = span.parent
        return False


class Total:
    """The count and total time of a short action.

    Attributes:
        calls: The count.
        hits: The count of actions with a result, where they may have none.
        nanoseconds: The total time.
    """

    __slots__ = ("calls", "hits", "nanoseconds")

    def __init__(self) -> None:
        self.calls = self.hits = self.nanoseconds = 0

    def add(self, other: Total) -> None:
        """Adds the numbers of another."""
        self.calls += other.calls
        self.hits += other.hits
        self.nanoseconds += other.nanoseconds


class Observer:
    """Receives the events of an export; every method may be left out.

    Attributes:
        details: Whether it receives nodes, rules, decompositions and rewrites too, and whether stages count actions that are
            too short for spans (:attr:`Span.totals`). That costs time for each node.
        describes: Whether it needs the full metadata of the program's nodes when the stage ``conversion`` ends, whatever
            the export's option ``metadata`` is.
        stays: Whether it also receives the events of the program after the export: saving and verification.
    """

    details: bool = False
    describes: bool = False
    stays: bool = True

    def begin(self, span: Span) -> None:
        """A span begins."""

    def end(self, span: Span) -> None:
        """A span has ended: with a result, or with an error."""

    def fired(self, rewrite: str, node: str) -> None:
        """A rewrite has replaced a node."""

    def step(self, text: str, done: int | None, total: int | None) -> None:
        """The present step of the running stage, in words, and its progress, where it is known."""

    def finish(self, error: BaseException | None) -> None:
        """The observed call has ended, with or without an error. An error that this method raises is the call's."""


class _Log(Observer):
    """Writes stages and details to the loggers (:mod:`onnxplug.logs`)."""

    _CONVERT, _REWRITE = logs.logger("convert"), logs.logger("rewrite")

    @property
    def details(self) -> bool:  # type: ignore[override]
        return self._CONVERT.isEnabledFor(logging.DEBUG) or self._REWRITE.isEnabledFor(logging.DEBUG)

    def end(self, span: Span) -> None:
        if span.kind == "rule":
            self._rule(span)
        elif span.log is not None and span.log.isEnabledFor(logging.INFO):
            known = ", ".join(f"{key} {value}" for key, value in span.about.items())
            span.log.info("%s: %.3f s%s", span.name, span.seconds, f" ({known})" if known else "")

    def _rule(self, span: Span) -> None:
        if not self._CONVERT.isEnabledFor(logging.DEBUG):
            return
        call, why = span.subject
        rule = span.about["rule"]
        if "declined" in span.about:
            reason = span.about["declined"] or "no reason given"
            self._CONVERT.debug("%s (%s): %s declined: %s", call, call.name, rule, reason)
        elif span.error is None:
            self._CONVERT.debug("%s (%s): %s of %s: %s", call, call.name, rule, span.about["package"], why())

    def fired(self, rewrite: str, node: str) -> None:
        self._REWRITE.debug("%s replaced %s", rewrite, node)


_LOG = _Log()
Kind = TypeVar("Kind", bound=Observer)


class Events:
    """Sends the events of a thread to observers.

    Args:
        observers: The observers.
        outer: The events around these; their observers receive these too.

    Attributes:
        observers: All observers; the first is the log.
        own: The observers among them that :func:`observed` ends.
    """

    def __init__(self, observers: Sequence[Observer] = (), outer: Events | None = None) -> None:
        known = outer.observers if outer is not None else [_LOG]
        self.own = [o for o in observers if not any(o is other for other in known)]
        self.observers: list[Observer] = [*known, *self.own]
        self._open: list[Span] = outer._open if outer is not None else []

    @property
    def details(self) -> Self | None:
        """These events, if any observer wants details."""
        return self if any(observer.details for observer in self.observers) else None

    @property
    def describes(self) -> bool:
        """Whether any observer reads the origins of nodes."""
        return any(observer.describes for observer in self.observers)

    def find(self, kind: type[Kind]) -> Kind | None:
        """The last observer of a class; ``None`` where there is none."""
        return next((o for o in reversed(self.observers) if isinstance(o, kind)), None)

    def add(self, observers: Sequence[Observer]) -> None:
        """Adds observers, for which the open spans begin now."""
        for observer in observers:
            self.own.append(observer)
            self.observers.append(observer)
            for span in self._open:
                observer.begin(span)

    def begin(self, name: str, kind: str = "stage", *, subject: Any = None, log: Any = None, **about: Any) -> Span:
        """Begins a span within the open span."""
        span = Span(name, kind, self._open[-1] if self._open else None, about, subject=subject, log=log)
        self._open.append(span)
        for observer in self.observers:
            if kind == "stage" or observer.details:
                observer.begin(span)
        return span

    def end(self, span: Span, error: BaseException | None = None) -> None:
        """Ends a span, and the spans within it that an error has left open."""
        if error is not None:
            span.error = error
            span.about.setdefault("error", type(error).__name__)
        while span in self._open:
            last = self._open.pop()
            last.finish()
            for observer in self.observers:
                if last.kind == "stage" or observer.details:
                    observer.end(last)
            last.subject = last.result = last.error = None

    @contextlib.contextmanager
    def span(
        self, name: str, kind: str = "stage", *, subject: Any = None, log: Any = None, **about: Any
    ) -> Iterator[Span]:
        """A span that lasts as long as the context."""
        span = self.begin(name, kind, subject=subject, log=log, **about)
        try:
            yield span
        except BaseException as error:
            self.end(span, error)
            raise
        self.end(span)

    def count(self, kind: str, name: str, started: int | None = None, *, hit: bool = False) -> None:
        """Counts a short action in the innermost open stage.

        Args:
            kind, name: The action.
            started: When it began, in nanoseconds of ``time.perf_counter_ns``, where its time counts.
            hit: Whether it had a result.
        """
        stage = next((span for span in reversed(self._open) if span.kind == "stage"), None)
        if stage is not None:
            total = stage.totals.setdefault((kind, name), Total())
            total.calls += 1
            total.hits += hit
            if started is not None:
                total.nanoseconds += time.perf_counter_ns() - started

    def fired(self, rewrite: str, node: str) -> None:
        """Tells that a rewrite replaced a node."""
        for observer in self.observers:
            if observer.details:
                observer.fired(rewrite, node)

    def step(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Sends the present step of the running stage."""
        for observer in self.observers:
            observer.step(text, done, total)


_current: ContextVar[Events | None] = ContextVar("onnxplug_events", default=None)


def events() -> Events:
    """The events of this thread; without observers only the log receives them."""
    current = _current.get()
    return current if current is not None else Events()


@contextlib.contextmanager
def observed(*observers: Observer, ends: bool = True) -> Iterator[Events]:
    """While the context lasts, observers receive the events of this thread, and so do the observers around it.

    Args:
        observers: The observers.
        ends: Whether their methods ``finish`` are called at the end, the last observer's first.
    """
    inner = Events(observers, _current.get())
    token = _current.set(inner)
    try:
        yield inner
    except BaseException as error:
        _current.reset(token)
        for observer in reversed(inner.own if ends else []):
            observer.finish(error)
        raise
    _current.reset(token)
    for observer in reversed(inner.own if ends else []):
        observer.finish(None)


def stage(
    name: str, log: str | None = None, *, subject: Any = None, **about: Any
) -> contextlib.AbstractContextManager[Span]:
    """A stage, or a part of one, that lasts as long as the context.

    Args:
        name: Its name.
        log: The logger (:data:`onnxplug.logs.LOGGERS`) that writes its time at its end.
        subject: Its object.
        about: Facts about it, which may be added to.
    """
    return events().span(name, subject=subject, log=logs.logger(log) if log is not None else None, **about)


def span(name: str, kind: str = "stage", **about: Any) -> contextlib.AbstractContextManager[Span]:
    """An action that occurs a few times in an export, not for each node."""
    return events().span(name, kind, **about)


def step(text: str, done: int | None = None, total: int | None = None) -> None:
    """Sends the present step of the running stage; for steps that take long.

    Args:
        text: In words.
        done, total: How far the stage is, where that is known.
    """
    current = _current.get()
    if current is not None:
        current.step(text, done, total)
