"""``onnxplug why`` and ``onnxplug ops``: which rule translates an operator, and which operators are translated."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from onnxplug.cli.options import ExactOption, RuntimeOption, parse_runtime, registry
from onnxplug.errors import MissingRuleError, OnnxplugError, UsageError
from onnxplug.registry.names import packet_of, without_prefix
from onnxplug.registry.target import DEFAULT_RUNTIME, Target, check_runtime, closeness
from onnxplug.text import counted, did_you_mean
from onnxplug_tools.cli.tables import show_table
from onnxplug_tools.library.names import matches, with_colons


def why(
    op: Annotated[
        str, typer.Argument(help="Which operators: aten::add.Tensor, mylib::nms for all its overloads, 'aten::*pool*'")
    ],
    opset: Annotated[str | None, typer.Option("--opset", help="Target opset: 21, or 21,com.microsoft=1")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Evaluate the rules' conditions for inputs of this dtype: float16 …")
    ] = None,
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    exact: ExactOption = False,
) -> None:
    """Show which rule translates an operator, and why the others don't."""
    from onnxplug.cli.inputs import parse_opset
    from onnxplug.cli.report import out
    from onnxplug.opsets import resolve_opsets

    opsets = resolve_opsets(parse_opset(opset))
    table, host = registry()
    name = check_runtime(parse_runtime(runtime), table.targets() | host.targets())
    target = Target(opset=opsets[""], opsets=opsets, runtime=name, exact=exact)
    op = _of_dtype(_qualified(table, op), dtype)
    names = _operators(table, op)
    explained = [_explain(table, host, name, target, dtype) for name in names]
    candidates = list({(id(row.rule), row.reason): row for rows, _ in explained for row in rows}.values())
    notes = [note for _, notes in explained for note in notes]
    computed = host.decomposers(op)
    if not candidates and computed:
        for name, package in computed.items():
            out.print(f"{name}: no rule; {package} decomposes it into other operators (onnxplug_decompositions)")
        return
    if not candidates:
        known = {name for key in table.operators() for name in (key, packet_of(key))}
        hint = host.explain_missing(op.partition("::")[0]) or did_you_mean(op, sorted(known), 3)
        raise OnnxplugError(f"no rule translates {op}; it is decomposed where torch can", hint=hint)
    conditions = [
        f"opset {opsets['']}",
        *([dtype] if dtype else []),
        name or "portable ONNX",
        *(["exact"] if exact else []),
    ]
    title = f"{op} at {', '.join(conditions)}"
    grid = Table(title=title)
    for column in ("operator", "rule", "package", "", "why"):
        grid.add_column(column, overflow="fold")
    for row in candidates:
        mark = "[green]taken[/]" if row.taken else "passed over"
        grid.add_row(row.rule.op, row.rule.name, row.source or "onnxplug", mark, escape(row.reason))
    out.print(grid)
    for note in notes:
        out.print(escape(note))
    left_out = [record.name for record in host.records() if record.status == "blocked" and record.error is None]
    if left_out:
        out.print(f"left out by a setting: {escape(', '.join(left_out))}")


def _operators(table: Any, pattern: str) -> list[str]:
    """The operators to explain: the named operator, or the operators that a pattern matches."""
    if not set(pattern) & set("*?["):
        return [with_colons(pattern)]
    return [name for name in table.operators() if matches(name, pattern)]


def _qualified(table: Any, pattern: str) -> str:
    """A name with its namespace; ``gelu`` or ``gelu.default`` gets aten, or the only namespace that has the name."""
    if set(pattern) & set(":*?["):
        return pattern
    named = (name for name in table.operators() if "::" in name)
    spaces = {
        space
        for space, _, name in (name.partition("::") for name in named)
        if pattern in (name, name.partition(".")[0])
    }
    space = "aten" if "aten" in spaces else next(iter(spaces)) if len(spaces) == 1 else None
    return pattern if space is None else f"{space}::{pattern}"


def _of_dtype(op: str, dtype: str | None) -> str:
    """The key of an operator's rules for inputs of a dtype: those for complex numbers are keyed ``complex:aten::…``."""
    from onnxplug.build.complexes import COMPLEX_PREFIX
    from onnxplug.build.quantized import QUANTIZED_PREFIX
    from onnxplug_tools.cli.nodes import find_dtype

    if dtype is None or op != without_prefix(op):
        return op
    is_quantised = str(find_dtype(dtype)).removeprefix("torch.").startswith(("qint", "quint"))
    prefix = COMPLEX_PREFIX if find_dtype(dtype).is_complex else QUANTIZED_PREFIX if is_quantised else ""
    return f"{prefix}{with_colons(op)}" if prefix else op


def _explain(table: Any, host: Any, op: str, target: Any, dtype: str | None) -> tuple[list[Any], list[str]]:
    if dtype is None:
        return table.explain(op, target), []
    from onnxplug.registry.names import find_overload
    from onnxplug_tools.cli.nodes import find_dtype, make_node

    wanted = find_dtype(dtype)
    samples = host.samples()
    overload = find_overload(op)
    names = [op]
    if "." not in op.partition("::")[2]:
        keyed = [name for name in table.operators() if name.startswith(f"{op}.")]
        names = keyed or ([f"{op}.{overload._overloadname}"] if overload is not None else [op])
    explanations: list[Any] = []
    notes: list[str] = []
    for name in names:
        node, made_from = make_node(name, wanted, samples)
        rows = table.explain(name, target, node)
        if any(row.rule.when is not None for row in rows):
            evaluated = "are evaluated for" if node is not None else "are not evaluated:"
            notes.append(f"Conditions on {name} {evaluated} {made_from}.")
        explanations.extend(rows)
    return list({(id(e.rule), e.reason): e for e in explanations}.values()), notes


def ops(
    pattern: Annotated[
        str, typer.Argument(help="aten::add.Tensor, aten::add for all its overloads, 'aten::*pool*'")
    ] = "*",
    plugin: Annotated[str | None, typer.Option("--plugin", help="Only this distribution's rules")] = None,
    missing: Annotated[
        str | None, typer.Option("--missing", help="TARGET: list the operators of a model that nothing translates")
    ] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="As for export, with --missing")] = None,
    opset: Annotated[str | None, typer.Option("--opset", help="Only what holds at this opset")] = None,
    runtime: Annotated[
        str | None,
        typer.Option("--target", help="Only what holds for this runtime, none: for portable ONNX; or what lacks there"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
) -> None:
    """List the operators that are translated, and by whom; or what a model lacks."""
    if missing is not None:
        _missing(missing, inputs or [], opset, DEFAULT_RUNTIME if runtime is None else runtime, as_json)
        return
    from onnxplug.cli.report import out

    rows = _rows(pattern, plugin, opset, runtime)
    if not rows:
        about = f" of {plugin}" if plugin else ""
        about += f" for the target {runtime}" if runtime else ""
        known = [op for name in registry()[0].operators() for op in (name, packet_of(name))]
        raise OnnxplugError(
            f"no rule{about} translates an operator like {pattern!r}", hint=did_you_mean(pattern, sorted(set(known)), 3)
        )
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    heads = ("operator", "package", "rule", "conditions", "reason")
    show_table("", heads, ([row["op"], *(row[head] for head in heads[1:])] for row in rows))
    count = len({row["op"] for row in rows})
    out.print(f"{counted(count, 'operator')}, {counted(len(rows), 'rule')}")


def _rows(pattern: str, plugin: str | None, opset: str | None, runtime: str | None) -> list[dict[str, Any]]:
    from onnxplug.cli.inputs import parse_opset
    from onnxplug.opsets import resolve_opsets
    from onnxplug_tools.cli.contents import rule_text

    table, host = registry()
    pattern = _qualified(table, pattern)
    opsets = resolve_opsets(parse_opset(opset)) if opset else None
    if plugin is not None:
        names = {name: r.distribution for r in host.records() for name in (r.name, r.distribution)}
        if plugin not in names:
            installed = f"Installed: {', '.join(sorted(names))}."
            raise UsageError(
                f"no plugin {plugin!r} is installed", hint=did_you_mean(plugin, sorted(names), otherwise=installed)
            )
        plugin = names[plugin]
    name = None if runtime is None else check_runtime(parse_runtime(runtime), table.targets() | host.targets())
    rows = []
    for layer, rule in table.rules():
        since, until = rule.opset
        outside = opsets is not None and not (since or 0) <= opsets[""] <= (until or 1 << 30)
        outside |= runtime is not None and closeness(rule.target, name) is None
        if not matches(rule.op, pattern) or outside or plugin not in (None, rule.source):
            continue
        _, _, conditions = rule_text(rule).partition(" (")
        rows.append(
            {
                "op": rule.op,
                "package": rule.source,
                "layer": layer.name.lower(),
                "rule": rule.name,
                "conditions": conditions.removesuffix(")"),
                "target": list(rule.target),
                "reason": rule.reason,
            }
        )
    return sorted(rows, key=lambda row: (row["op"], row["layer"] != "plugin"))


def _missing(target: str, inputs: list[str], opset: str | None, runtime: str, as_json: bool) -> None:
    import torch

    from onnxplug.cli.inputs import parse_input, parse_opset
    from onnxplug.cli.report import out, progress
    from onnxplug.cli.targets import load_target
    from onnxplug.exporter import to_onnx

    lacking: dict[str, list[str]] = {}
    try:
        with progress() as shown:
            shown("loading")
            loaded = load_target(target, [parse_input(text) for text in inputs])
            if isinstance(loaded.model, torch.nn.Module) and not isinstance(loaded.model, torch.jit.ScriptModule):
                loaded.model.eval()
            to_onnx(
                loaded.model,
                loaded.args,
                kwargs=loaded.kwargs,
                opset_version=parse_opset(opset),
                target=parse_runtime(runtime),
                registry=registry(),
                progress=shown,
            )
    except MissingRuleError as error:
        lacking = error.missing
        if not as_json:
            raise
        sys.stderr.write(f"{error.hint}\n")
    if as_json:
        sys.stdout.write(json.dumps(lacking, indent=2) + "\n")
    else:
        out.print(f"{target} has no operator without a translation: each has a rule or is decomposed")
    if lacking:
        raise typer.Exit(1)
