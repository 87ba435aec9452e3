"""A report in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxplug.text import counted, printable
from onnxplug_tools.inspection.words import bytes_text
from onnxplug_tools.report.graph import flowchart
from onnxplug_tools.report.text import number_text, seconds_text

if TYPE_CHECKING:
    from onnxplug_tools.report.record import Capture, Facts, Failure, Verification

_LONGEST_TABLE = 40
#: Characters that would be markup in a line of text.
_MARKUP = re.compile(r"[\\`*<>|~]|!(?=\[)|\[(?=[^\]]*\][(\[:])|(?<![^\W_])_|_(?![^\W_])|^[#+\-=](?=\s)|&(?=#?\w+;)")


def plain(text: object) -> str:
    """A text that is no markup, in one line."""
    return _MARKUP.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), printable(str(text)).replace("\n", " "))


_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def fenced(text: str, language: str = "") -> list[str]:
    """A block of text that is shown as it is, or as its language defines."""
    text = printable(text)
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip(), fence, ""]


def summary(report: Facts) -> str:
    """The first lines of a report, as text."""
    return printable("\n".join(f"{name}: {value}" for name, value in summary_rows(report)))


def summary_rows(report: Facts) -> list[tuple[str, str]]:
    """The rows at the top of a report: names and values."""
    failure, view, capture = report.failure, report.view, report.capture
    rows = [("model", report.model)]
    if failure is None:
        rows.append(("result", "exported"))
    else:
        rows.append(("result", f"failed in the stage {failure.stage}: {failure.error}"))
    rows.append(("verification", verification_text(report)))
    rows += [("file", f"{file.path} ({bytes_text(file.bytes)})") for file in report.files]
    if report.opsets:
        rows.append(("opsets", ", ".join(f"{name} {version}" for name, version in report.opsets.items())))
    if view is not None:
        root = view.root
        rows += [
            ("nodes", f"{number_text(len(view.nodes))}, {counted(len(view.operators), 'operator')}"),
            ("weights", f"{number_text(root.total_parameters)} parameters, {bytes_text(root.total_bytes)}"),
            ("estimated FLOPs", flops_text(report)),
        ]
    if capture is not None and capture.strategy:
        rows.append(("captured", f"{capture.strategy}, {counted(capture.nodes, 'FX node')}"))
    rows.append(("time", seconds_text(report.seconds)))
    if report.warnings:
        rows.append(("warnings", str(len(report.warnings))))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())))
    return rows


def flops_text(report: Facts) -> str:
    """The estimated operations, and the sizes for which they are estimated."""
    assert report.view is not None
    root = report.view.root
    sizes = ", ".join(f"{name}={size}" for name, size in report.sizes.items())
    of = f" at {sizes}" if sizes else ""
    without = f", without {counted(root.total_unestimated, 'node')}" if root.total_unestimated else ""
    return f"{number_text(root.total_flops)}{of}{without}"


def verification_text(report: Facts) -> str:
    """The outcome of verification, in words."""
    verification = report.verification
    if verification is None:
        is_requested = report.arguments.get("verify") == "True"
        return "not reached" if is_requested and report.failure is not None else "not asked for"
    if verification.error is not None:
        return "failed"
    return f"the same as PyTorch on {counted(len(verification.cases), 'set')} of inputs"


def to_markdown(report: Facts) -> str:
    """See :meth:`ExportReport.markdown`."""
    lines = ["# Export to ONNX", "", *(f"- {plain(name)}: {plain(value)}" for name, value in summary_rows(report)), ""]
    if report.failure is not None:
        lines += _failure(report.failure)
    lines += _table("Warnings", ("warning", "line", "class"), [(w.text, w.place, w.category) for w in report.warnings])
    for table in report.tables:
        lines += _table(table.title, table.head, table.rows)
    lines += _table("Inputs", ("name", "type"), report.inputs)
    lines += _table("Outputs", ("name", "type"), report.outputs)
    if report.capture is not None:
        lines += _capture(report.capture)
    if report.view is not None:
        lines += _table("Operators", ("operator", "nodes"), _rows(report.view.operators))
        top = report.view.root.children
        lines += _table(
            "Modules",
            ("module", "class", "nodes", "parameters", "bytes", "estimated FLOPs"),
            [
                (
                    m.path,
                    ", ".join(kind.rpartition(".")[2] for kind in m.classes),
                    m.total_nodes,
                    number_text(m.total_parameters),
                    bytes_text(m.total_bytes),
                    number_text(m.total_flops),
                )
                for m in top
            ],
        )
        if report.view.nodes:
            lines += ["## The graph by modules", "", *fenced(flowchart(report.view), "mermaid")]
    lines += _table(
        "Decomposed by torch",
        ("operator", "by", "times", "lines"),
        [(d.op, d.by, d.times, _some(d.places)) for d in report.decomposed],
    )
    lines += _table("Folded constants", ("operator", "times"), _rows(report.folded))
    lines += _table(
        "Rewrites",
        ("rewrite", "package", "times", "nodes"),
        [(r.name, r.package, r.times, r.nodes) for r in report.rewrites],
    )
    lines += _table("Functions", ("function", "calls"), _rows(report.functions))
    lines += _table("Rules by package", ("package", "nodes"), _rows(report.packages))
    if report.verification is not None:
        lines += _verification(report.verification)
    lines += _times(report)
    lines += _table("Arguments", ("argument", "value"), list(report.arguments.items()))
    lines += _table(
        "Plugins",
        ("plugin", "package", "version", "status"),
        [
            (p.name, p.distribution, p.version, f"{p.status}: {p.error}" if p.error else p.status)
            for p in report.plugins
        ],
    )
    return "\n".join(lines)


def _failure(failure: Failure) -> list[str]:
    lines = ["## Error", "", *fenced(f"{failure.error}: {failure.message}")]
    if failure.hint:
        lines += ["Hint:", "", *fenced(failure.hint)]
    if failure.place:
        lines += [f"Line: {plain(failure.place)}", ""]
    lines += _table(
        "Operators without a rule",
        ("operator", "lines", "what is known"),
        [(m.op, _some(m.places), "; ".join(m.reasons)) for m in failure.missing],
    )
    if failure.traceback:
        lines += ["## Traceback", "", *fenced(failure.traceback)]
    return lines


def _capture(capture: Capture) -> list[str]:
    lines = _table(
        "Attempts at capture",
        ("mode", "seconds", "outcome"),
        [(a.mode, f"{a.seconds:.3f}", a.error or "captured") for a in capture.attempts],
    )
    lines += _table("Dynamic dimensions", ("name", "sizes"), list(capture.dimensions.items()))
    lines += _table(
        "Taken for granted of sizes",
        ("condition", "line", "about"),
        [(c.text, c.place or "", "all but the size 1 fulfil it" if c.only_small else "") for c in capture.conditions],
    )
    if capture.repeated:
        lines += [f"Operator calls that repeated an equal one: {capture.repeated}.", ""]
    return lines


def _verification(verification: Verification) -> list[str]:
    rows: list[Sequence[Any]] = []
    for case in verification.cases:
        sizes = ", ".join(f"{name}={size}" for name, size in case.sizes.items()) or "static"
        origin = "given" if case.seed is None else f"seed {case.seed}"
        rows += [
            (sizes, origin, o.name, o.elements, f"{o.max_abs_difference:.1e}", o.problem or "accepted", case.runtime)
            for o in case.outputs
        ]
    columns = ("sizes", "inputs", "output", "elements", "largest difference", "result", "run by")
    lines = _table("Verification", columns, rows)
    if verification.error:
        lines += fenced(verification.error)
    if any(case.outputs for case in verification.cases):
        head = ("difference", "elements")
        lines += _table("Differences in units of each element's tolerance", head, verification.histogram.bars())
    lines += [f"- skipped: {plain(reason)}" for reason in verification.skipped]
    return [*lines, ""] if verification.skipped else lines


def _times(report: Facts) -> list[str]:
    times = report.times
    if times is None:
        return []
    rows = [
        (f"{'– ' * depth}{stage.name}", f"{stage.seconds:.3f}", f"{stage.own_seconds:.3f}", stage.calls)
        for depth, stage in times.stage_rows()
    ]
    lines = _table("Times", ("stage", "seconds", "own", "times"), rows)
    rules = [(r.op, r.rule, r.package, r.calls, r.declined or "", f"{1e3 * r.own_seconds:.2f}") for r in times.rules()]
    return lines + _table("Times of rules", ("operator", "rule", "package", "calls", "declined", "own ms"), rules)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table under its title; nothing where it is empty."""
    listed = list(rows)
    if not listed:
        return []
    cells = [head, ["---"] * len(head), *([plain(cell) for cell in row] for row in listed[:_LONGEST_TABLE])]
    lines = [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells), ""]
    return [*lines, f"… {len(listed) - _LONGEST_TABLE} more", ""] if len(listed) > _LONGEST_TABLE else lines


def _rows(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda row: -row[1])


def _some(places: Sequence[str], most: int = 5) -> str:
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more
