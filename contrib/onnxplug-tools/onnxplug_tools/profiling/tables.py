"""A profile as tables."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onnxplug_tools.profiling.sums import Sums

#: The width of the tables as text: enough for names of rules and places in the code.
_WIDTH = 160


def plain_text(profile: Sums, rows: int) -> str:
    """The tables without colours, a line of text each row."""
    file = io.StringIO()
    console = Console(file=file, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    for table in tables(profile, rows):
        console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def tables(profile: Sums, rows: int) -> Iterator[Table]:
    """The tables; empty tables are left out.

    Args:
        rows: The most rows of each table, except of the stages; of the FX nodes ten at most.
    """
    yield _stages(profile)
    together = profile.seconds
    modules = [
        (m.name, _count(m.calls), _seconds(m.own_seconds), _seconds(m.seconds), m.longest) for m in profile.modules()
    ]
    yield from _table("Modules that torch.export traced", _MODULES, modules, rows)
    rules = [
        (
            r.op,
            r.rule,
            r.package,
            _count(r.calls),
            _count(r.declined),
            _milliseconds(r.own_seconds),
            _milliseconds(r.seconds),
        )
        for r in profile.rules()
    ]
    yield from _table("Rules", _RULES, rules, rows)
    parts = [(p.name, _count(p.calls), _milliseconds(p.seconds)) for p in profile.parts()]
    yield from _table(
        "What rules do through the builder, and what they wait for", ("part", ">calls", ">ms"), parts, rows
    )
    packages = [(p.package, _count(p.calls), _milliseconds(p.own_seconds)) for p in profile.packages()]
    if len(packages) > 1:
        yield from _table("Packages", ("package", ">calls", ">own ms"), packages, rows)
    rewrites = [(r.name, _count(r.tries), _count(r.fired), _milliseconds(r.seconds)) for r in profile.rewrites()]
    yield from _table("Rewrites", ("rewrite", ">tried", ">matched", ">ms"), rewrites, rows)
    nodes = [(n.name, n.op, n.location, _milliseconds(n.seconds), _share(n.seconds, together)) for n in profile.nodes()]
    yield from _table("FX nodes that took longest to convert", _NODES, nodes, min(rows, 10))


#: The heads of columns; ``>`` stands before the heads of numbers.
_MODULES = ("class", ">calls", ">own s", ">s", "longest")
_RULES = ("operator", "rule", "package", ">calls", ">declined", ">own ms", ">ms")
_NODES = ("node", "operator", "line", ">ms", ">share")


def _stages(profile: Sums) -> Table:
    table = _new(f"Stages: {profile.seconds:.2f} s", ("stage", ">s", ">own s", ">share", ">times", "about"))
    together = profile.seconds

    for depth, stage in profile.stage_rows():
        about = ", ".join(f"{key} {value}" for key, value in stage.about.items() if key != "why")
        name = Text(f"{'  ' * depth}{stage.name}", style="bold" if not depth else "")
        numbers = [_seconds(stage.seconds), _seconds(stage.own_seconds), _share(stage.seconds, together)]
        remark = Text(about, style="red" if "error" in stage.about else "")
        table.add_row(name, *map(Text, numbers), Text(_count(stage.calls)), remark)
    return table


def _new(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=None)
    for column in columns:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> Iterator[Table]:
    if rows:
        left_out = f", {most} of {len(rows)}" if len(rows) > most else ""
        table = _new(f"\n{title}{left_out}", columns)
        for row in rows[:most]:
            table.add_row(*map(Text, row))  # names may hold markup of rich
        yield table


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _share(seconds: float, together: float) -> str:
    return f"{seconds / together:.0%}" if together else ""


def _count(count: Any) -> str:
    return f"{count:,}" if count else ""
