"""``docs/libraries.md``, from outcomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version

from tests.libraries.report import Outcome, exporting
from tests.libraries.rows import Library
from tests.libraries.ways import WAYS

_NEW, _OURS = WAYS[1:]
_OLD = WAYS[0]


def render(measured: Mapping[Library, Mapping[str, dict[str, Outcome]]]) -> str:
    """The page.

    Args:
        measured: By library and way, the outcome of each test; empty where a way is missing.
    """
    tables = {library: exporting(dict(outcomes)) for library, outcomes in measured.items()}
    lines = [
        "# Exports of other libraries",
        "",
        "Written by `make libraries`: the tests of exports in the source distributions of libraries on PyPI, and, where a source",
        "distribution has none, calls of the library's own entry points (`tests/libraries/calls`), whose files ONNX Runtime runs and",
        f"PyTorch {version('torch').partition('+')[0]} is compared with on two sets of inputs. Each runs three times: with `dynamo=False` and `dynamo=True` in every call of",
        "`torch.onnx.export`, and unchanged under [`onnxplug.as_torch_onnx()`](coming-from-torch-onnx.md#programs-of-others). A test that",
        "exports nothing is not counted. Weights are random.",
        "",
        "| library | version | tests of | tests | dynamo=False | dynamo=True | onnxplug |",
        "|---|---|---|---|---|---|---|",
    ]
    sums = dict.fromkeys(WAYS, 0)
    for library, rows in tables.items():
        if not measured[library]:
            lines.append(f"| {library.name} | {library.version} | not run | | | | |")
            continue
        counts = {way: sum(row[way].outcome == "passed" for row in rows.values()) for way in WAYS}
        sums = {way: sums[way] + counts[way] for way in WAYS}
        origin = (
            "its own, and calls"
            if library.tests and library.calls.exists()
            else "its own"
            if library.tests
            else "calls"
        )
        cells = [library.name, library.version, origin, len(rows), *counts.values()]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.append(f"| all | | | {sum(map(len, tables.values()))} | " + " | ".join(map(str, sums.values())) + " |")
    lines += ["", "## What onnxplug fails and dynamo=False passes", ""]
    behind = [
        f"| {library.name} | `{_short(name)}` | {_cell(row[_OURS])} |"
        for library, rows in tables.items()
        for name, row in rows.items()
        if row[_OLD].outcome == "passed" and row[_OURS].outcome != "passed"
    ]
    lines += ["| library | test | reason |", "|---|---|---|", *behind] if behind else ["Nothing."]
    lines += [
        "",
        "## What one of the ways fails",
        "",
        "| library | test | " + " | ".join(WAYS) + " |",
        "|---|---|---|---|---|",
    ]
    for library, rows in tables.items():
        for name, row in rows.items():
            if any(row[way].outcome != "passed" for way in WAYS):
                lines.append(
                    f"| {library.name} | `{_short(name)}` | " + " | ".join(_cell(row[way]) for way in WAYS) + " |"
                )
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return re.sub(r"^.*?(\w+\.py::)", r"\1", name).replace("|", "\\|")


def _cell(outcome: Outcome) -> str:
    if outcome.outcome == "passed":
        return "passed"
    lines = [line.strip() for line in outcome.reason.splitlines() if line.strip()]
    text = re.sub(r"\x1b\[\d+m|0x[0-9a-f]+|/\S*/(?=\S)", "", " ".join(lines[:2]))[:160] or outcome.outcome
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
