"""``onnxplug fleet run``, ``status``, ``diff`` and ``serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from onnxplug.cli.options import debug_option

fleet_app = typer.Typer(
    help="Export the models of a manifest, and see what changed.", no_args_is_help=True, pretty_exceptions_enable=False
)

OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="The fleet's folder: its state, pages and files")]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Where files go: a folder, s3://…, gs://…, az://…; by default --out"),
]
_COLOURS = {"exported": "green", "unchanged": "dim", "different": "yellow", "failed": "red", "killed": "red"}


@fleet_app.command()
@debug_option
def run(
    manifest: Annotated[Path, typer.Argument(help="The manifest, in TOML; docs/fleet.md has its keys")],
    out: OutOption = Path("fleet"),
    store: StoreOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Processes at the same time; 0: this one, without limits")
    ] = None,
    on: Annotated[str | None, typer.Option("--on", metavar="WHERE", help="ray, or ray://HOST:PORT")] = None,
) -> None:
    """Export what has changed since the last run; go on with a run that was interrupted."""
    from onnxplug.cli.report import err, out as console
    from onnxplug_fleet.executors import executor_for
    from onnxplug_fleet.manifest import read_manifest
    from onnxplug_fleet.runner import is_fine, run_fleet

    processors = os.cpu_count() or 1
    read = read_manifest(manifest)
    count = workers if workers is not None else read.workers or processors
    read = read_manifest(manifest, threads=max(1, processors // max(1, count)))
    executor = executor_for(on, count)
    with _progress(len(read.jobs)) as show:
        done = run_fleet(read, out, executor, store=store, ended=show)
    words = ", ".join(f"{number} {status}" for status, number in done.counts().items())
    console.print(f"run {done.number}: {words}", markup=False)
    err.print(f"page: {out / 'runs' / str(done.number) / 'index.html'}", markup=False)
    if not is_fine(done):
        raise typer.Exit(1)


class _progress:
    """A bar on a terminal, and a line for each job that ends."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from onnxplug.cli.report import err

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, disable=not err.is_terminal)
        self._task = self._progress.add_task("jobs", total=total)

    def __enter__(self) -> Any:
        self._progress.start()
        return self.show

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def show(self, name: str, result: dict[str, Any], done: int, total: int) -> None:
        """Shows a job that has ended."""
        status = result["status"]
        reasons = result.get("reasons") or ([result["error"]] if result.get("error") else [])
        more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        why = f": {escape(reasons[0])}{more}" if reasons else ""
        head = f"[{_COLOURS[status]}]{status:9}[/] {escape(name)} ({result['seconds']:.1f} s)"
        self._progress.console.print(f"{head}{why}")
        self._progress.update(self._task, completed=done)


def _state(out: Path) -> Any:
    """The state of a fleet that exists."""
    from onnxplug.errors import UsageError
    from onnxplug_fleet.state import State

    if not (out / "fleet.db").is_file():
        raise UsageError(
            f"there is no fleet in {out}", hint="onnxplug fleet run MANIFEST makes one; --out DIR names another."
        )
    return State(out)


@fleet_app.command()
@debug_option
def status(
    which: Annotated[str, typer.Argument(metavar="[RUN]", help="A number, last, or last-1")] = "last",
    out: OutOption = Path("fleet"),
) -> None:
    """Show what came of each job of a run."""
    from onnxplug.cli.report import out as console
    from onnxplug_fleet.compare import number_text
    from onnxplug_fleet.text import bytes_text, seconds_text

    shown = _state(out).chosen(which)
    going = "" if shown.ended is not None else ", not ended"
    table = Table("model", "status", "difference", "latency", "size", "why", title=escape(f"run {shown.number}{going}"))
    for name, result in shown.results.items():
        if result is None:
            table.add_row(escape(name), "waiting")
            continue
        why = result.get("error") or "; ".join(result.get("reasons", ())[:3])
        numbers = (
            number_text(result.get("difference")),
            seconds_text(result.get("latency")),
            bytes_text(result.get("size")),
        )
        table.add_row(escape(name), f"[{_COLOURS[result['status']]}]{result['status']}[/]", *numbers, escape(why))
    console.print(table)


@fleet_app.command()
@debug_option
def diff(
    before: Annotated[str, typer.Argument(metavar="RUN", help="A number, last, or last-1")],
    after: Annotated[str, typer.Argument(metavar="RUN", help="Another one")],
    out: OutOption = Path("fleet"),
) -> None:
    """Show what differs between two runs; exit status 1 where something does."""
    from onnxplug.cli.report import out as console
    from onnxplug_fleet.compare import compared

    state = _state(out)
    one, other = state.chosen(before), state.chosen(after)
    rows = [row for row in compared(one, other) if row.changes]
    table = Table("model", "what differs", title=f"run {one.number} and run {other.number}")
    for row in rows:
        table.add_row(escape(row.name), escape("\n".join(row.changes)))
    if rows:
        console.print(table)
        raise typer.Exit(1)
    console.print(f"run {one.number} and run {other.number}: no difference", markup=False)


@fleet_app.command()
@debug_option
def serve(
    out: OutOption = Path("fleet"),
    store: StoreOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any that is free")] = 8000,
) -> None:
    """Serve the pages of all runs."""
    from onnxplug.cli.report import out as console
    from onnxplug.errors import UsageError
    from onnxplug_fleet.serve import make_server
    from onnxplug_fleet.store import Store

    _state(out).close()
    try:
        server = make_server(out, Store(store or str(out.absolute())), host, port)
    except OSError as error:
        raise UsageError(
            f"port {port} of {host} can't be used: {error}", hint="--port 0 takes one that is free."
        ) from None
    with server:
        console.print(f"http://{server.server_address[0]!s}:{server.server_address[1]} (Ctrl-C ends it)", markup=False)
        server.serve_forever()
