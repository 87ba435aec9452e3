"""A warning after an export of the nodes that its target would not compute, and a table of them in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxplug.observers import Observer, Span
from onnxplug.warn import warn
from onnxplug_targets.prediction import Fallback, Judge, consequence, inlined, summary
from onnxplug_targets.table import load

if TYPE_CHECKING:
    from onnxplug import OnnxProgram

_MOST, _LINES = 12, 3


class TargetWarning(UserWarning):
    """A target would not compute some nodes of a model."""


class TargetObserver(Observer):
    """Judges each program, warns of the nodes that the target would not compute, and adds them to the report.

    Args:
        target: The target.
        stage: The stage that makes a program, or changes its types last.
    """

    describes = True

    def __init__(self, target: str, stage: str) -> None:
        self._judge = Judge(load(target))
        self._stage = stage

    def end(self, span: Span) -> None:
        """Judges a program."""
        if span.kind == "stage" and span.name == self._stage and span.error is None:
            self._judged(span.subject if span.name == "precision" else span.result)

    def _judged(self, program: OnnxProgram) -> None:
        model = inlined(program.model)
        table, fallbacks = self._judge.table, list(self._judge.fallbacks(model))
        if program.report is not None:
            rows = [(f.operator, f.node, f.reason, f.consequence, f.place) for f in fallbacks]
            title = f"Nodes that {table['title']} would not compute"
            program.report.add_table(title, ("operator", "node", "reason", "what happens", "line"), rows)
        if fallbacks:
            total = sum(1 for node in model.graph.all_nodes() if node.op_type != "Constant")
            warn(_text(table, fallbacks, total), TargetWarning)


def _text(table: Mapping[str, Any], fallbacks: list[Fallback], total: int) -> str:
    rows = summary(fallbacks)
    lines = [f"{table['title']} would not compute {len(fallbacks)} of {total} nodes, by its table ({table['asked']}):"]
    for operator, reason, breaks, count, places in rows[:_MOST]:
        more = f" and {len(places) - _LINES} more" if len(places) > _LINES else ""
        where = f", at {', '.join(places[:_LINES])}{more}" if places else ""
        lines.append(f"  {count} {operator}: {reason}; {consequence(breaks)}{where}")
    if len(rows) > _MOST:
        lines.append(f"  and {len(rows) - _MOST} more kinds; report=True lists all nodes")
    return "\n".join(lines)
