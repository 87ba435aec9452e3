"""The records of an export, summed up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from onnxplug.observers import Span, Total
from onnxplug_tools.profiling.recorder import Recorder

#: The version of :meth:`Sums.to_dict`, counted up when a key changes its meaning or is gone.
FORMAT = 1


@dataclass
class StageTime:
    """A stage of an export, or a part of one.

    Attributes:
        seconds: How long all its runs took, with its parts.
        about: Facts about its last run: ``error`` where an error ended it.
        parts: The stages within it, in the order in which they began.
    """

    name: str
    seconds: float = 0.0
    own_seconds: float = 0.0
    calls: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    parts: list[StageTime] = field(default_factory=list)


@dataclass
class RuleTime:
    """A rule, or a decomposition of an operator by torch.

    Attributes:
        rule: ``package.module:function`` of the converter, or the name of the decomposition.
        declined: How often it left the operator to the next rule.
        seconds: How long it took, with other rules that it called.
    """

    op: str
    rule: str
    package: str
    calls: int = 0
    declined: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0


@dataclass
class RewriteTime:
    """A rewrite."""

    name: str
    tries: int
    fired: int
    seconds: float


@dataclass
class NodeTime:
    """An FX node that was converted.

    Attributes:
        location: The user's ``file:line``.
        seconds, own_seconds: How long it took, with and without the nodes of its decomposition.
    """

    name: str
    op: str
    location: str
    seconds: float
    own_seconds: float


@dataclass
class ModuleTime:
    """The modules of one class, as torch.export traced them.

    Attributes:
        seconds: How long the trace took, with the modules within; modules of a class within each other count once.
    """

    name: str
    calls: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0
    longest: str = ""


@dataclass
class PartTime:
    """An action of rules through the builder, a part of the rules' own time."""

    name: str
    calls: int
    seconds: float


class Sums:
    """Recorded spans, and their sums by stage, rule, rewrite, node and module.

    Args:
        root: The span that the sums are about; ``None``: everything that was recorded.
    """

    def __init__(self, recorder: Recorder, root: Span | None = None) -> None:
        self.recorder = recorder
        self._root = root

    @property
    def spans(self) -> list[Span]:
        """The spans, in the order in which they began."""
        root = self._root
        if root is None:
            return list(self.recorder.spans)
        # Later actions on the program lie in no other span, like the export itself.
        later = root.parent is None
        start = self.recorder.spans.index(root)
        return [span for span in self.recorder.spans[start:] if later or span.is_within(root)]

    @property
    def seconds(self) -> float:
        """How long all spans together took."""
        spans = self.spans
        known = {id(span) for span in spans}
        return sum(span.seconds for span in spans if id(span.parent) not in known)

    def stages(self) -> list[StageTime]:
        """The stages, each with the stages that it consists of; equal stages side by side count as one."""
        top: list[StageTime] = []
        made: dict[int, StageTime] = {}
        for span in self.spans:
            if span.kind != "stage":
                continue
            outer = span.parent
            while outer is not None and id(outer) not in made:
                outer = outer.parent
            siblings = made[id(outer)].parts if outer is not None else top
            same = next((stage for stage in siblings if stage.name == span.name), None)
            if same is None:
                same = StageTime(span.name)
                siblings.append(same)
            same.calls += 1
            same.seconds += span.seconds
            same.about = dict(span.about)
            made[id(span)] = same
        _set_own_seconds(top)
        return top

    def stage_rows(self) -> list[tuple[int, StageTime]]:
        """The stages and their parts in the order of a table, each with its depth."""
        rows: list[tuple[int, StageTime]] = []
        pending = [(0, stage) for stage in reversed(self.stages())]
        while pending:
            depth, stage = pending.pop()
            rows.append((depth, stage))
            pending += [(depth + 1, part) for part in reversed(stage.parts)]
        return rows

    def rules(self) -> list[RuleTime]:
        """The rules that were called, and torch's decompositions, by own time, the longest first."""
        times: dict[tuple[str, str, str], RuleTime] = {}
        for span in self.spans:
            if span.kind not in ("rule", "decomposition"):
                continue
            key = span.name, span.about.get("rule", ""), span.about.get("package", "")
            row = times.setdefault(key, RuleTime(*key))
            row.calls += 1
            row.declined += "declined" in span.about
            row.own_seconds += span.own_seconds
            if not _is_in_like(span, key):
                row.seconds += span.seconds
        return sorted(times.values(), key=lambda row: -row.own_seconds)

    def packages(self) -> list[RuleTime]:
        """The rules of each package together."""
        times: dict[str, RuleTime] = {}
        for rule in self.rules():
            row = times.setdefault(rule.package, RuleTime("", "", rule.package))
            row.calls += rule.calls
            row.declined += rule.declined
            row.own_seconds += rule.own_seconds
            row.seconds = row.own_seconds
        return sorted(times.values(), key=lambda row: -row.own_seconds)

    def rewrites(self) -> list[RewriteTime]:
        """The rewrites that were tried, by time, the longest first."""
        times = [
            RewriteTime(name, total.calls, total.hits, total.nanoseconds / 1e9)
            for name, total in self._totals("rewrite").items()
        ]
        return sorted(times, key=lambda row: -row.seconds)

    def nodes(self) -> list[NodeTime]:
        """The FX nodes that were converted, by time, the longest first."""
        inner = self._seconds_of_inner_nodes()
        times = []
        for span in self.spans:
            if span.kind == "node":
                op, location = span.about.get("op", ""), span.about.get("location", "")
                own = span.seconds - inner.get(id(span), 0.0)
                times.append(NodeTime(span.name, op, location, span.seconds, own))
        return sorted(times, key=lambda row: -row.seconds)

    def _seconds_of_inner_nodes(self) -> dict[int, float]:
        """How long the nodes directly within each node took."""
        seconds: dict[int, float] = {}
        for span in self.spans:
            outer = span.parent if span.kind == "node" else None
            while outer is not None and outer.kind != "node":
                outer = outer.parent
            if outer is not None:
                seconds[id(outer)] = seconds.get(id(outer), 0.0) + span.seconds
        return seconds

    def modules(self) -> list[ModuleTime]:
        """The classes of the modules that torch.export traced, by own time, the longest first."""
        times: dict[str, ModuleTime] = {}
        longest: dict[str, float] = {}
        for span in self.spans:
            if span.kind != "module":
                continue
            row = times.setdefault(span.name, ModuleTime(span.name))
            row.calls += 1
            row.own_seconds += span.own_seconds
            if not _is_in_like(span, (span.name,)):
                row.seconds += span.seconds
            if span.seconds > longest.get(span.name, -1.0):
                longest[span.name], row.longest = span.seconds, span.about.get("path", "")
        return sorted(times.values(), key=lambda row: -row.own_seconds)

    def parts(self) -> list[PartTime]:
        """The actions of rules through the builder: shape inference, simplification."""
        return [PartTime(name, total.calls, total.nanoseconds / 1e9) for name, total in self._totals("part").items()]

    def _totals(self, kind: str) -> dict[str, Total]:
        totals: dict[str, Total] = {}
        for span in self.spans:
            for (of, name), total in span.totals.items():
                if of == kind:
                    totals.setdefault(name, Total()).add(total)
        return totals

    def to_dict(self) -> dict[str, Any]:
        """All sums as values that JSON can hold; times in seconds."""
        import torch

        import onnxplug

        return {
            "format": FORMAT,
            "onnxplug": onnxplug.__version__,
            "torch": str(torch.__version__),
            "began": self.recorder.began.isoformat(timespec="milliseconds"),
            "seconds": self.seconds,
            "stages": [asdict(stage) for stage in self.stages()],
            "modules": [asdict(row) for row in self.modules()],
            "rules": [asdict(row) for row in self.rules()],
            "packages": {row.package: {"calls": row.calls, "own_seconds": row.own_seconds} for row in self.packages()},
            "rewrites": [asdict(row) for row in self.rewrites()],
            "nodes": [asdict(row) for row in self.nodes()],
            "parts": [asdict(row) for row in self.parts()],
        }


def _set_own_seconds(stages: list[StageTime]) -> None:
    for stage in stages:
        stage.own_seconds = max(0.0, stage.seconds - sum(part.seconds for part in stage.parts))
        _set_own_seconds(stage.parts)


def _key(span: Span) -> tuple[str, ...]:
    return (span.name, span.about.get("rule", ""), span.about.get("package", ""))


def _is_in_like(span: Span, key: tuple[str, ...]) -> bool:
    """Whether a span lies within a span of the same kind and key, whose time includes its own."""
    outer = span.parent
    while outer is not None:
        if outer.kind == span.kind and _key(outer)[: len(key)] == key:
            return True
        outer = outer.parent
    return False
