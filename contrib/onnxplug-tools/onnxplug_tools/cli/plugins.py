"""``onnxplug plugins list | show | check | new``."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from onnxplug.cli.options import debug_option, plugin_options, selection
from onnxplug.errors import OnnxplugError, PluginError, UsageError
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.plugins.libraries import LIBRARIES
from onnxplug.registry.rule import load_object
from onnxplug.text import counted
from onnxplug_tools.cli.contents import describe

plugins_app = typer.Typer(help="Installed plugins.", no_args_is_help=True)

#: Seconds that importing one plugin and calling its hooks may take.
TIMEOUT = 10.0
FIELDS = ("name", "distribution", "version", "value", "status", "error", "seconds", "hooks", "rules", "namespaces")

JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds that importing one plugin may take before it is given up")
]


@plugins_app.command("list")
@plugin_options
def plugins_list(as_json: JsonOption = False, timeout: TimeoutOption = TIMEOUT) -> None:
    """List installed plugins, loaded or not, and why."""
    from onnxplug.cli.report import out

    manager, broken = _loaded(timeout)
    records = [_row(record) for record in manager.records()]
    if as_json:
        sys.stdout.write(json.dumps(records, indent=2) + "\n")
    else:
        table = Table("plugin", "distribution", "version", "status", "rules", "import", "hooks")
        for record in records:
            error = record["error"]
            status = record["status"] if error is None else f"{record['status']}: {error.splitlines()[-1]}"
            hooks = ", ".join(h.removeprefix("onnxplug_") for h in record["hooks"])
            table.add_row(
                record["name"],
                record["distribution"],
                record["version"],
                escape(status),
                "not read" if record["rules"] is None else str(record["rules"]),
                _time_text(record),
                hooks,
            )
        out.print(table)
    if broken is not None:
        first, *_, last = broken.message.splitlines()  # a traceback is between them
        raise PluginError(f"{first} {last}", hint="`onnxplug plugins show NAME` says more.")


def _loaded(timeout: float) -> tuple[Any, PluginError | None]:
    """The selected plugins, loaded, and the error of a broken plugin that the selection requires.

    Text that plugins print while they load goes to standard error.
    """
    from onnxplug.cli.report import progress

    manager = load_object("onnxplug.plugins.manager:PluginManager", "the plugin manager")(selection())
    with progress() as shown, warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        shown("importing plugins")
        warnings.simplefilter("ignore")
        import torch  # an export imports it anyway: no plugin's time includes it

        del torch
        try:
            manager.load(seconds=timeout)
        except PluginError as error:
            return manager, error
    return manager, None


def _row(record: Any) -> dict[str, Any]:
    return {field: getattr(record, field) for field in FIELDS}


def _time_text(record: dict[str, Any]) -> str:
    text = f"{1e3 * record['seconds']:.0f} ms"
    return f"[yellow]{text}, slow[/]" if record["seconds"] > 1 and record["distribution"] != PROJECT_NAME else text


@plugins_app.command("show")
@plugin_options
def plugins_show(
    name: Annotated[str, typer.Argument(help="An entry point's or a distribution's name")],
    as_json: JsonOption = False,
    timeout: TimeoutOption = TIMEOUT,
) -> None:
    """Show what one plugin supplies: its rules, domains, rewrites, samples; or why it is broken."""
    from onnxplug.cli.report import out
    from onnxplug_tools.testing.faults import unknown_plugin

    manager, _ = _loaded(timeout)
    chosen = [record for record in manager.records() if name in (record.name, record.distribution)]
    if not chosen:
        raise unknown_plugin(name, manager)
    rows = []
    for record in chosen:
        contents = {hook: describe(hook, value) for hook, value in manager.supplied(record).items()}
        rows.append({**_row(record), "contents": contents})
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    for row in rows:
        table = Table(show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        lines = [
            ("plugin", f"{row['name']} = {row['value']}"),
            ("distribution", f"{row['distribution']} {row['version']}"),
            ("status", row["status"]),
            ("import", f"{1e3 * row['seconds']:.0f} ms"),
            ("namespaces", ", ".join(row["namespaces"]) or "not said"),
            ("hooks", ", ".join(row["hooks"]) or "none"),
        ]
        for hook, contents in row["contents"].items():
            lines.append((hook.removeprefix("onnxplug_"), "\n".join(contents) or "none"))
        if row["error"]:
            lines.append(("error", row["error"]))
        for title, value in lines:
            table.add_row(title, escape(value))
        out.print(table)


@plugins_app.command("check")
@plugin_options
def plugins_check(
    name: Annotated[str | None, typer.Argument(help="One plugin; all but the builtin one unless given")] = None,
    opset: Annotated[list[int] | None, typer.Option("--opset", help="Only this opset; repeat for several")] = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = TIMEOUT,
) -> None:
    """Hold plugins to what they promise, at every opset, and to the library that they are for."""
    from onnxplug.cli.report import out, progress
    from onnxplug_tools.testing.faults import check_plugins

    with progress() as shown:
        shown("checking plugins")
        findings = check_plugins(selection(), name=name, opsets=opset, timeout=timeout)
    broken = [f for f in findings if f.severity == "error"]
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        colours = {"error": "red", "note": "yellow", "ok": "green"}
        for finding in findings:
            mark = f"[{colours[finding.severity]}]{finding.severity:5}[/]"
            out.print(f"{mark} {finding.plugin}: {finding.kind}: {escape(finding.message)}")
        if not findings:
            out.print("no plugin is installed beside the builtin one")
    if broken:
        raise OnnxplugError(f"{counted(len(broken), 'problem')} found")


@plugins_app.command("new")
@debug_option
def plugins_new(
    name: Annotated[str | None, typer.Argument(help="Name of the distribution: onnxplug-acme")] = None,
    library: Annotated[
        str | None,
        typer.Option("--for", metavar="LIBRARY", help="A library, by its import name: stubs for its operators"),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op", help="The custom operator: acme::soft_clip; with --for only operators like this, repeatable"
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the package's folder is made")] = Path("."),
) -> None:
    """Write a package with a custom operator, its rule, samples and tests; or with a stub for each operator of a library."""
    from onnxplug.cli.report import out, progress

    if library is None:
        _new_operator(name, op or [], folder)
        return
    from onnxplug_tools.scaffold.library import write_library_package

    with progress() as shown:
        shown(f"importing {library}")
        package = write_library_package(library, folder, name, op or [])
    where = escape(str(package.folder))
    out.print(f"{library} registers {package.summary}", soft_wrap=True)
    out.print(
        f"wrote {where}: a rule without its formula, inputs and a test for {counted(len(package.operators), 'operator')}",
        soft_wrap=True,
    )
    out.print(f"next: pip install -e '{where}' && pytest '{where}', which says what is missing", soft_wrap=True)
    known = LIBRARIES.get(library.partition(".")[0])
    if known is not None:
        out.print(f"{known} translates operators of {library} already: pip install {known}", soft_wrap=True)


def _new_operator(name: str | None, ops: list[str], folder: Path) -> None:
    """Writes a package with an operator of its own."""
    from onnxplug.cli.report import out
    from onnxplug_tools.scaffold.write import write_package

    if name is None or len(ops) > 1:
        raise UsageError(
            "plugins new takes the name of the distribution, and one operator",
            hint="onnxplug plugins new onnxplug-acme, or --for LIBRARY for the operators of a library",
        )
    package = write_package(name, folder, ops[0] if ops else None)
    out.print(
        f"wrote {escape(str(package.folder))}: the operator {package.op}, its rule, samples and tests", soft_wrap=True
    )
    out.print(f"next: pip install -e '{escape(str(package.folder))}' && pytest '{escape(str(package.folder))}'")
