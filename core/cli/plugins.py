"""``onnxplug plugins list | show | check | new``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from onnxplug.cli.options import debug_option, plugin_options, selection
from onnxplug.cli.probe import TIMEOUT, probe
from onnxplug.errors import OnnxplugError, PluginError, UnknownPluginError
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.text import counted, did_you_mean

plugins_app = typer.Typer(help="Installed plugins.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds that importing one plugin may take before it is given up")
]


@plugins_app.command("list")
@plugin_options
def plugins_list(as_json: JsonOption = False, timeout: TimeoutOption = TIMEOUT) -> None:
    """List installed plugins, loaded or not, and why."""
    from onnxplug.cli.report import out, progress

    chosen = selection()
    with progress() as shown:
        shown("importing plugins")
        records = probe(chosen, timeout)
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
    _refuse_broken(chosen, records)


def _time_text(record: dict[str, Any]) -> str:
    if record["status"] == "hangs":
        return f"[red]> {record['seconds']:.1f} s[/]"
    text = f"{1e3 * record['seconds']:.0f} ms"
    return f"[yellow]{text}, slow[/]" if record["seconds"] > 1 and record["distribution"] != PROJECT_NAME else text


def _refuse_broken(chosen: Any, records: list[dict[str, Any]]) -> None:
    """A broken plugin that is required, or any with ``--strict-plugins``, makes the command fail."""
    from packaging.requirements import Requirement

    required = {Requirement(text).name for text in chosen.require}
    for record in records:
        wanted = chosen.strict or required & {record["name"], record["distribution"]}
        if wanted and record["status"] in ("failed", "hangs"):
            raise PluginError(
                f"the plugin {record['name']} of {record['distribution']} is broken: {record['error'].splitlines()[-1]}",
                hint=f"`onnxplug plugins show {record['name']}` says more.",
            )


@plugins_app.command("show")
@plugin_options
def plugins_show(
    name: Annotated[str, typer.Argument(help="An entry point's or a distribution's name")],
    as_json: JsonOption = False,
    timeout: TimeoutOption = TIMEOUT,
) -> None:
    """Show what one plugin supplies: its rules, domains, rewrites, samples; or why it is broken."""
    from onnxplug.cli.report import out, progress

    with progress() as shown:
        shown("importing plugins")
        records = probe(selection(), timeout, contents_of=name)
    found = [r for r in records if name in (r["name"], r["distribution"])]
    if not found:
        known = sorted({known for r in records for known in (r["name"], r["distribution"])})
        raise UnknownPluginError(
            f"no plugin {name!r} is installed",
            hint=did_you_mean(name, known, otherwise="`onnxplug plugins list` shows those that are."),
        )
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for record in found:
        table = Table(show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        rows = [
            ("plugin", f"{record['name']} = {record['value']}"),
            ("distribution", f"{record['distribution']} {record['version']}"),
            ("status", record["status"]),
            ("import", f"{1e3 * record['seconds']:.0f} ms"),
            ("namespaces", ", ".join(record["namespaces"]) or "not said"),
            ("hooks", ", ".join(record["hooks"]) or "none"),
        ]
        for hook, lines in record.get("contents", {}).items():
            rows.append((hook.removeprefix("onnxplug_"), "\n".join(lines) or "none"))
        if record["error"]:
            rows.append(("error", record["error"]))
        for row, value in rows:
            table.add_row(row, escape(value))
        out.print(table)


@plugins_app.command("check")
@plugin_options
def plugins_check(
    name: Annotated[str | None, typer.Argument(help="One plugin; all but the builtin one unless given")] = None,
    opset: Annotated[list[int] | None, typer.Option("--opset", help="Only this opset; repeat for several")] = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = TIMEOUT,
) -> None:
    """Hold plugins to what they promise: samples at every opset, no conflicts, no dead or shadowed rules."""
    from onnxplug.cli.report import out, progress
    from onnxplug.registry.rule import load_object

    with progress() as shown:
        shown("checking plugins")
        findings = load_object("onnxplug.plugins.check:check_plugins", "the plugin check")(
            selection(), name=name, opsets=opset, timeout=timeout, probe=probe
        )
    broken = [f for f in findings if f.severity == "error"]
    if as_json:
        fields = ("plugin", "severity", "kind", "message")
        sys.stdout.write(json.dumps([{k: getattr(f, k) for k in fields} for f in findings], indent=2) + "\n")
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
    name: Annotated[str, typer.Argument(help="Name of the distribution: onnxplug-acme")],
    op: Annotated[str | None, typer.Option("--op", help="The custom operator: acme::soft_clip")] = None,
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the package's folder is made")] = Path("."),
) -> None:
    """Write a package with a custom operator, its rule, samples and tests; it installs and its tests pass."""
    from onnxplug.cli.report import out
    from onnxplug.scaffold.write import write_package

    package = write_package(name, folder, op)
    out.print(
        f"wrote {escape(str(package.folder))}: the operator {package.op}, its rule, samples and tests", soft_wrap=True
    )
    out.print(f"next: pip install -e '{escape(str(package.folder))}' && pytest '{escape(str(package.folder))}'")
