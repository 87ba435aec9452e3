"""What an export tells while it runs, and to whom: stages with their results, and, for those who want details, nodes and rules.

An :class:`Observer` is given to a call (``to_onnx(observers=[...])``), supplied by a plugin (``onnxplug_observers``), or made of an
option (``report``, ``profile``, ``progress``). Code that is observed says what it does by :func:`stage`, :func:`span` and
:func:`step`; what happens for each node asks :attr:`Events.details` once, and tells nothing where that is ``None``.
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
#: The stages that an export consists of, in their order; the last two where they are asked for.
STAGES = ("capture", "conversion", "verification", "saving")
#: The spans of whole exports.
ROOTS = ("export", "torch.onnx.export")


class Span:
    """Something that is done, from a beginning to an end.

    ``subject``, ``result`` and ``error`` are there until everyone is told of the end, so that who keeps spans keeps no models.

    Attributes:
        name: What is done.
        kind: One of :data:`KINDS`.
        parent: The span within which it is done; ``None`` for one that is in no other.
        subject: What it is done with: of an export the arguments and the function that was called, of ``capture`` the plan, of
            ``verification`` and ``saving`` the program, of a rule the call and a function that says why it was chosen.
        result: What a stage made, once it has ended: of ``capture`` the capture, of ``conversion`` and of an export the program, of
            ``verification`` the report.
        error: What ended it.
        start, end: Nanoseconds of ``time.perf_counter_ns``; the end is that of now while it lasts.
        within: Nanoseconds that the spans directly within it took.
        about: What else is known of it, by name; what stands in JSON.
        totals: What was done in it that is too short for spans of its own, by kind and name; of stages alone.
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
        """The export that it is part of, the innermost; itself where it is an export."""
        span: Span | None = self
        while span is not None and span.name not in ROOTS:
            span = span.parent
        return span

    def is_within(self, other: Span) -> bool:
        """Whether it is another span, or lies within it."""
        span: Span | None = self
        while span is not None:
            if span is other:
                return True
            span = span.parent
        return False


class Total:
    """How often something short was done, and how long all of it took.

    Attributes:
        calls: How often.
        hits: How often with a result, where that may be.
        nanoseconds: How long.
    """

    __slots__ = ("calls", "hits", "nanoseconds")

    def __init__(self) -> None:
        self.calls = self.hits = self.nanoseconds = 0

    def add(self, other: Total) -> None:
        """Adds another one's numbers."""
        self.calls += other.calls
        self.hits += other.hits
        self.nanoseconds += other.nanoseconds


class Observer:
    """Is told what an export does; every method may be left out.

    Attributes:
        details: Whether it is told of nodes, rules, decompositions and rewrites too, and whether stages count what is too short
            for spans (:attr:`Span.totals`). That costs time for each node.
        describes: Whether the nodes of the program say everything of where they come from when the stage ``conversion`` ends,
            whatever the metadata of the export are to be.
        stays: Whether it is told of what is done with the program after the export: saving and verification.
    """

    details: bool = False
    describes: bool = False
    stays: bool = True

    def begin(self, span: Span) -> None:
        """Something begins."""

    def end(self, span: Span) -> None:
        """Something has ended: with a result, or with an error."""

    def fired(self, rewrite: str, node: str) -> None:
        """A rewrite has replaced a node."""

    def step(self, text: str, done: int | None, total: int | None) -> None:
        """What the stage that is at work does now, in words, and how far it is, where that is known."""

    def finish(self, error: BaseException | None) -> None:
        """The call that it was given to has ended, with an error or without. An error that it raises itself is the call's."""


class _Log(Observer):
    """Writes stages, and what they say in detail, to the loggers (:mod:`onnxplug.logs`)."""

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
    """Tells observers what is done in a thread.

    Args:
        observers: Who is told.
        outer: The events within which these are; their observers are told too.

    Attributes:
        observers: Everyone who is told; the first is the log.
        own: Those of them that :func:`observed` ends.
    """

    def __init__(self, observers: Sequence[Observer] = (), outer: Events | None = None) -> None:
        known = outer.observers if outer is not None else [_LOG]
        self.own = [o for o in observers if not any(o is other for other in known)]
        self.observers: list[Observer] = [*known, *self.own]
        self._open: list[Span] = outer._open if outer is not None else []

    @property
    def details(self) -> Self | None:
        """These events, where someone wants details."""
        return self if any(observer.details for observer in self.observers) else None

    @property
    def describes(self) -> bool:
        """Whether someone reads where the nodes come from."""
        return any(observer.describes for observer in self.observers)

    def find(self, kind: type[Kind]) -> Kind | None:
        """The last observer of a class; ``None`` where there is none."""
        return next((o for o in reversed(self.observers) if isinstance(o, kind)), None)

    def add(self, observers: Sequence[Observer]) -> None:
        """Takes in more observers, to which what is open begins now."""
        for observer in observers:
            self.own.append(observer)
            self.observers.append(observer)
            for span in self._open:
                observer.begin(span)

    def begin(self, name: str, kind: str = "stage", *, subject: Any = None, log: Any = None, **about: Any) -> Span:
        """Begins a span within the one that is open."""
        span = Span(name, kind, self._open[-1] if self._open else None, about, subject=subject, log=log)
        self._open.append(span)
        for observer in self.observers:
            if kind == "stage" or observer.details:
                observer.begin(span)
        return span

    def end(self, span: Span, error: BaseException | None = None) -> None:
        """Ends a span, and those within it that an error has left open."""
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
        """Counts something short in the innermost stage that is open.

        Args:
            kind, name: What is counted.
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
        """Tells what the stage that is at work does now."""
        for observer in self.observers:
            observer.step(text, done, total)


_current: ContextVar[Events | None] = ContextVar("onnxplug_events", default=None)


def events() -> Events:
    """The events of this thread; the log alone is told where nobody observes."""
    current = _current.get()
    return current if current is not None else Events()


@contextlib.contextmanager
def observed(*observers: Observer, ends: bool = True) -> Iterator[Events]:
    """While the context lasts, observers are told of what is done in this thread, and those around it too.

    Args:
        observers: Who is told.
        ends: Whether their methods ``finish`` are called at the end, the last one's first.
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
        name: What it is called.
        log: The logger (:data:`onnxplug.logs.LOGGERS`) that says at its end how long it took.
        subject: What it is done with.
        about: What is known of it, to be added to.
    """
    return events().span(name, subject=subject, log=logs.logger(log) if log is not None else None, **about)


def span(name: str, kind: str = "stage", **about: Any) -> contextlib.AbstractContextManager[Span]:
    """Something that is done a few times in an export, not for each node."""
    return events().span(name, kind, **about)


def step(text: str, done: int | None = None, total: int | None = None) -> None:
    """Says what the stage that is at work does now. For what takes long by itself.

    Args:
        text: In words.
        done, total: How far the stage is, where that is known.
    """
    current = _current.get()
    if current is not None:
        current.step(text, done, total)
