"""The time of an export, without other actions that are recorded in the same process."""

from __future__ import annotations

from onnxplug.observers import ROOTS, Span
from onnxplug_tools.profiling.recorder import Recorder
from onnxplug_tools.profiling.sums import Sums


class Times(Sums):
    """The spans of one report.

    Attributes:
        ranges: Their beginnings and ends among the recorder's spans; the last end is ``None`` while spans are added.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.ranges: list[tuple[int, int | None]] = []

    def begin(self) -> None:
        """From here on spans belong to the report."""
        self.ranges.append((len(self.recorder.spans), None))

    def end(self) -> None:
        """From here on spans don't belong to the report."""
        if self.ranges and self.ranges[-1][1] is None:
            self.ranges[-1] = (self.ranges[-1][0], len(self.recorder.spans))

    @property
    def spans(self) -> list[Span]:
        """The spans, in the order in which they began."""
        return [span for start, end in self.ranges for span in self.recorder.spans[start:end]]

    def failed_stage(self) -> str | None:
        """The stage that an error ended; ``None`` where there is none."""
        spans = self.spans
        known = {id(span) for span in spans}
        failed = {id(span) for span in spans if span.kind == "stage" and "error" in span.about}
        for span in reversed(spans):
            outer = span.parent
            is_top = outer is None or id(outer) not in known or (id(outer) in failed and outer.name in ROOTS)
            if id(span) in failed and is_top and span.name not in ROOTS:
                return span.name
        return None
