"""Records what an export does, and when: spans that lie within each other.

Nothing is recorded unless a recorder is active, and what would be done once for each node (:mod:`onnxplug.interpret.observed`,
:mod:`onnxplug.build.observed`) takes the place of the ordinary code only then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

#: The kinds of spans: a stage of an export or a part of one, the trace of a module of the model, the conversion of an FX node,
#: the call of a rule, the decomposition of an operator, a rewrite that fired.
KINDS = ("stage", "module", "node", "rule", "decomposition", "rewrite")


class Span:
    """Something that was done, from a beginning to an end.

    Attributes:
        name: What was done.
        kind: One of :data:`KINDS`.
        parent: The span within which it was done; ``None`` for one that is in no other.
        start, end: Nanoseconds of ``time.perf_counter_ns``; the end is that of now while it lasts.
        within: Nanoseconds that the spans directly within it took.
        about: What else is known of it, by name; what stands in JSON.
        totals: What was done in it that is too short for spans of its own, by kind and name; of stages alone.
    """

    __slots__ = ("_end", "about", "kind", "name", "parent", "start", "totals", "within")

    def __init__(self, name: str, kind: str, parent: Span | None, about: dict[str, Any]) -> None:
        self.name = name
        self.kind = kind
        self.parent = parent
        self.about = about
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


class Recorder:
    """The spans of one or more exports, in the order in which they began; used by one thread at a time.

    Attributes:
        spans: All of them.
        began: The time of day at which it was made.
        thread: The thread that made it.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.began = datetime.now().astimezone()
        self.origin = time.perf_counter_ns()
        self.thread = threading.get_native_id()
        self._open: list[Span] = []

    def begin(self, name: str, kind: str = "stage", **about: Any) -> Span:
        """Begins a span within the one that is open."""
        span = Span(name, kind, self._open[-1] if self._open else None, about)
        self.spans.append(span)
        self._open.append(span)
        return span

    def finish(self, span: Span) -> None:
        """Ends a span, and those within it that an error has left open."""
        while span in self._open:
            last = self._open.pop()
            last.finish()

    @contextlib.contextmanager
    def span(self, name: str, kind: str = "stage", **about: Any) -> Iterator[Span]:
        """A span that lasts as long as the context; an error that leaves it is noted."""
        span = self.begin(name, kind, **about)
        try:
            yield span
        except BaseException as error:
            span.about.setdefault("error", type(error).__name__)
            raise
        finally:
            self.finish(span)

    def total(self, kind: str, name: str) -> Total:
        """What is counted under a name, in the innermost stage that is open."""
        stage = next((span for span in reversed(self._open) if span.kind == "stage"), None)
        if stage is None:
            return Total()
        return stage.totals.setdefault((kind, name), Total())


_active: ContextVar[Recorder | None] = ContextVar("onnxplug_recorder", default=None)


def active() -> Recorder | None:
    """The recorder of this thread; ``None`` where nothing is recorded."""
    return _active.get()


@contextlib.contextmanager
def recording(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Records while the context lasts.

    Args:
        recorder: Where to; a new one unless given.
    """
    chosen = recorder if recorder is not None else Recorder()
    token = _active.set(chosen)
    try:
        yield chosen
    finally:
        _active.reset(token)


@contextlib.contextmanager
def span(name: str, kind: str = "stage", **about: Any) -> Iterator[Span | None]:
    """A span of the active recorder that lasts as long as the context; ``None`` where nothing is recorded.

    For what is done a few times in an export, not for each node.
    """
    recorder = _active.get()
    if recorder is None:
        yield None
    else:
        with recorder.span(name, kind, **about) as found:
            yield found
