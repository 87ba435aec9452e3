"""The output of commands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.markup import escape
from rich.table import Table

from onnxplug.cli.console import PlainConsole
from onnxplug.packages import is_installed, load
from onnxplug.progress import Display
from onnxplug.text import shortened, value_text

if TYPE_CHECKING:
    from rich.console import Console

    from onnxplug import OnnxPieces
    from onnxplug.program import OnnxProgram

#: The largest number of characters in a message: a name of a million characters would hide it.
LONGEST_MESSAGE = 8000
#: Width of tables in a file or pipe, so that no cell is truncated.
out = PlainConsole(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
err = PlainConsole(stderr=True, highlight=False, soft_wrap=True)


def progress() -> AbstractContextManager[Display]:
    """A spinner with the running stage and its seconds, on a terminal; nothing elsewhere."""
    return displayed(err)


def reporting(folder: Path | None, *, verify: bool = False) -> AbstractContextManager[None]:
    """Writes a report of the command to a folder when the context ends, also after an error, and prints its place.

    Args:
        folder: The folder; ``None`` for no report.
        verify: Whether the command verifies.

    Raises:
        SaveError: The folder can't be made, or the report of a command that succeeded can't be written.
        MissingPackageError: The package that reports is not installed.
    """
    if folder is None:
        return contextlib.nullcontext()
    report: AbstractContextManager[None] = load("--report")(folder, verify)
    return report


def note(text: str) -> None:
    """A note on standard error."""
    err.print(f"[bold]note:[/] {escape(text)}")


def failure(message: str, hint: str | None = None) -> None:
    """An error's message and its hint."""
    err.print(f"[bold red]error:[/] {escape(shortened(message, LONGEST_MESSAGE))}")
    if hint:
        err.print(f"[bold]hint:[/] {escape(shortened(hint, LONGEST_MESSAGE))}")


def displayed(console: Console | None = None) -> contextlib.AbstractContextManager[Display]:
    """A spinner with the stage and its seconds while the context lasts; nothing where the console is no terminal.

    Args:
        console: The console; standard error by default.
    """
    if not is_installed("progress="):
        return contextlib.nullcontext(Display())
    spinner: contextlib.AbstractContextManager[Display] = load("progress=").displayed(console)
    return spinner


def size_text(path: Path) -> str:
    """Size of a model's file and of its data files."""
    from onnxplug.run.data_files import data_files

    total = path.stat().st_size
    files = [path.resolve().parent / name for name in data_files(path)]
    data_size = sum(f.stat().st_size for f in files if os.path.isfile(f))
    data = f" and {filesize.decimal(data_size)} of external data" if data_size else ""
    return filesize.decimal(total) + data


def summary(program: OnnxProgram, path: Path) -> None:
    """The table after an export."""
    statistics = program.statistics
    table = Table(show_header=False)
    operators = ", ".join(f"{name} {count}" for name, count in list(statistics.operators.items())[:6])
    rows = [
        ("file", f"{path} ({size_text(path)})"),
        ("opset", ", ".join(f"{n or 'ai.onnx'} {v}" for n, v in program.model.opset_imports.items())),
        ("nodes", f"{statistics.onnx_nodes} from {statistics.fx_nodes} FX nodes: {operators}"),
        ("rules", ", ".join(f"{name} {count}" for name, count in statistics.packages.items())),
        ("inputs", ", ".join(f"{v.name} {value_text(v)}" for v in program.model.graph.inputs)),
        ("outputs", ", ".join(f"{v.name} {value_text(v)}" for v in program.model.graph.outputs)),
        ("capture", f"{statistics.capture_seconds:.2f} s, {statistics.strategy}"),
        ("conversion", f"{statistics.conversion_seconds:.2f} s"),
    ]
    if statistics.functions:
        calls = ", ".join(f"{name} {count}" for name, count in statistics.functions.items())
        rows.append(("functions", f"{len(statistics.functions)} for calls of modules: {calls}"))
    if statistics.decomposed:
        rows.append(("decomposed", f"the whole program, by torch, because of {', '.join(statistics.decomposed)}"))
    for name, value in rows:
        table.add_row(name, escape(value))
    out.print(table)
    if program.precision is not None:
        out.print(str(program.precision), markup=False)


def summary_of_pieces(pieces: OnnxPieces, files: Sequence[Path], *, verified: bool) -> None:
    """The tables after an export in pieces, and the chain of the pieces.

    Args:
        files: Those of the pieces, in their order; further files are passed over.
    """
    for program, file in zip(pieces.programs.values(), files, strict=False):
        summary(program, file)
    if pieces.chain_file is not None:
        out.print(f"{pieces.chain_file} runs them one after the other.", markup=False)
    for gap in pieces.gaps:
        out.print(f"no program chains them: {gap}", markup=False)
    if files[-1].name == "config.pbtxt":
        repository, model = files[-1].parents[1], files[-1].parent.name
        out.print(f"tritonserver --model-repository={repository} serves them, and the ensemble {model}.", markup=False)
    if verified:
        out.print("The chain computes what PyTorch does.", markup=False)


def verification(report: Any) -> None:
    """The results of verification."""
    table = Table("sizes", "inputs", "largest difference", "run by", title="Same as PyTorch")
    for case in report.cases:
        sizes = ", ".join(f"{name}={size}" for name, size in case.sizes.items()) or "static"
        seed = "the export's" if case.seed is None else f"seed {case.seed}"
        table.add_row(sizes, seed, f"{case.max_abs_difference:.1e}", case.runtime)
    out.print(table)
    for reason in report.skipped:
        out.print(f"skipped: {escape(reason)}")
    if report.about_quantising:
        out.print(report.about_quantising, markup=False)
