"""Records the actions of an export with their times, as spans that lie within each other."""

from __future__ import annotations

import threading
import time
from datetime import datetime

from onnxplug.observers import Observer, Span


class Recorder(Observer):
    """The spans of one or more exports, in the order in which they began; used by one thread at a time.

    Attributes:
        began: The time of day at which it was made.
        saved: The real paths of the models that were saved meanwhile, as far as it is told the ends of spans.
    """

    details = True

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.saved: set[str] = set()
        self.began = datetime.now().astimezone()
        self.origin = time.perf_counter_ns()
        self.thread = threading.get_native_id()

    def begin(self, span: Span) -> None:
        """Keeps a span."""
        self.spans.append(span)
