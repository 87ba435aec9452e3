"""``onnxplug plugins check``: reports faults of installed plugins."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from onnxplug.errors import OnnxplugError, PluginError, RuleConflictError, UnknownPluginError
from onnxplug.observers import step
from onnxplug.opsets import MIN_OPSET, max_opset, resolve_opsets
from onnxplug.plugins.loading import unmet
from onnxplug.plugins.manager import PluginManager
from onnxplug.plugins.records import PluginRecord, Selection
from onnxplug.registry.names import is_known_operator, known_namespaces, packet_of, without_prefix
from onnxplug.registry.registry import OnnxRegistry
from onnxplug.registry.rule import Rule
from onnxplug.registry.target import DEFAULT_RUNTIME, Target
from onnxplug.text import counted, did_you_mean
from onnxplug_tools.library.check import library_rows
from onnxplug_tools.library.operators import is_installed


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        severity: ``"error"``, ``"note"`` or ``"ok"``.
        kind: The kind of check: ``"import"``, ``"rule"``, ``"conflict"``, ``"sample"`` …
    """

    plugin: str
    severity: str
    kind: str
    message: str


def check_plugins(
    selection: Selection,
    *,
    name: str | None = None,
    opsets: Sequence[int] | None = None,
    timeout: float = 10.0,
) -> list[Finding]:
    """Checks the plugins of a selection.

    Args:
        name: The plugin to check; all but the builtin plugin when ``None``.
        opsets: Run samples at these opsets only.
        timeout: Seconds that importing a plugin may take.

    Raises:
        OpsetError: An opset is outside of onnxplug's range.
        UnknownPluginError: There is no such plugin.
    """
    for opset in opsets or ():
        resolve_opsets(opset)
    selection = replace(selection, strict=False, require=())
    manager = PluginManager(selection)
    if name is not None and not any(name in (r.name, r.distribution) for r in manager.records()):
        raise unknown_plugin(name, manager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.load(seconds=timeout)
        findings, table = _registry(manager)
    for record in manager.records():
        if (record.is_builtin and name is None) or name not in (None, record.name, record.distribution):
            continue
        if record.status == "failed":
            findings.append(Finding(record.name, "error", "import", f"{record.status}: {record.error}"))
        elif record.status == "loaded":
            findings.extend(_check_one(record, manager, table, opsets))
            if not record.is_builtin:
                findings += [Finding(record.name, *row) for row in library_rows(record, manager.supplied(record))]
        else:
            findings.append(Finding(record.name, "note", "import", record.error or "left out"))
    return [f for f in findings if name is None or _is_about(f, manager, name)]


def unknown_plugin(name: str, manager: PluginManager) -> UnknownPluginError:
    """The error for the name of a plugin that is not installed."""
    known = sorted({known for r in manager.records() for known in (r.name, r.distribution)})
    hint = did_you_mean(name, known, otherwise="`onnxplug plugins list` shows those that are.")
    return UnknownPluginError(f"no plugin {name!r} is installed", hint=hint)


def _is_about(finding: Finding, manager: PluginManager, name: str) -> bool:
    return any(r.name == finding.plugin for r in manager.records() if name in (r.name, r.distribution))


def _registry(manager: PluginManager) -> tuple[list[Finding], OnnxRegistry]:
    """The findings on plugins that state a rule twice, and the registry of all rules without theirs."""
    findings = []
    builtin, _ = manager.rules()
    rules: list[Rule] = []
    for record in manager.records():
        own = manager.supplied(record).get("onnxplug_rules", []) if not record.is_builtin else []
        try:
            OnnxRegistry((), own)
        except PluginError as error:
            findings.append(Finding(record.name, "error", "rule", error.message))
        else:
            rules.extend(own)
    return findings, OnnxRegistry(builtin, rules)


def _check_one(
    record: PluginRecord, manager: PluginManager, table: OnnxRegistry, opsets: Sequence[int] | None
) -> list[Finding]:
    supplied = manager.supplied(record)
    rules: list[Rule] = supplied.get("onnxplug_rules", [])
    rows = [*(("error", "requires", problem) for problem in unmet(record.requires)), *_converters(rules)]
    rows += _dead(rules, record)
    rows += _shadowed(rules, table)
    rows += _conflicts(rules, record, table)
    rows += _samples(supplied.get("onnxplug_samples", []), rules, record, table, manager, opsets)
    if not any(severity == "error" for severity, _, _ in rows):
        rows.append(("ok", "rules", f"{counted(len(rules), 'rule')}: no conflict, none dead, none shadowed"))
    return [Finding(record.name, *row) for row in rows]


_Row = tuple[str, str, str]


def _converters(rules: Sequence[Rule]) -> Iterator[_Row]:
    for rule in rules:
        try:
            rule.resolve()
        except OnnxplugError as error:
            yield "error", "rule", error.message


def _dead(rules: Sequence[Rule], record: PluginRecord) -> Iterator[_Row]:
    """Rules that no export can ever use."""
    newest = max_opset()
    absent: dict[str, list[Rule]] = {}
    for rule in rules:
        since, until = rule.opset
        if (since or 0) > newest or (until is not None and until < MIN_OPSET):
            yield "error", "dead rule", f"{rule!r} holds at no opset that is supported ({MIN_OPSET} to {newest})"
        if _is_of_absent_library(rule.op, record):
            absent.setdefault(without_prefix(rule.op).partition("::")[0], []).append(rule)
        elif not _known(rule.op, record.libraries):
            yield (
                "error",
                "dead rule",
                f"{rule!r}: torch does not know {rule.op}, after importing {record.value} and "
                f"{rule.op.partition('::')[0]}",
            )

    for namespace, of_namespace in absent.items():
        count = counted(len(of_namespace), "rule")
        yield "note", "absent library", f"{namespace} is not installed: {count} for its operators can't be checked"


def _is_of_absent_library(op: str, record: PluginRecord) -> bool:
    """Whether an operator is of a library that the plugin translates, and that is not installed."""
    namespace = without_prefix(op).partition("::")[0]
    if namespace not in record.namespaces or namespace in known_namespaces() or namespace in sys.modules:
        return False
    return not any(map(is_installed, (namespace, *record.libraries)))


def _known(op: str, libraries: Sequence[str]) -> bool:
    if is_known_operator(op):
        return True
    # A library may define its operators when it is imported.
    for name in (without_prefix(op).partition("::")[0], *libraries):
        try:
            if is_installed(name):
                importlib.import_module(name)
        except Exception:
            continue
    return is_known_operator(op)


def _shadowed(rules: Sequence[Rule], table: OnnxRegistry) -> Iterator[_Row]:
    own = {id(rule) for rule in rules}
    for rule in table.refused:
        if id(rule) in own:
            yield (
                "error",
                "shadowed rule",
                f"{rule!r} is never used: onnxplug translates {rule.op} itself, and the rule has no override=True",
            )


def _conflicts(rules: Sequence[Rule], record: PluginRecord, table: OnnxRegistry) -> Iterator[_Row]:
    domains = {name: v for _, rule in table.rules() for name, v in rule.domains.items()}
    for op in dict.fromkeys(rule.op for rule in rules):
        names = _overloads(op, table)
        runtimes = [DEFAULT_RUNTIME, None, *{n for rule in rules if rule.op == op for n in rule.target}]
        for opset in range(MIN_OPSET, max_opset() + 1):
            targets = product(({"": opset}, {"": opset, **domains}), dict.fromkeys(runtimes), (False, True))
            try:
                for (opsets, runtime, exact), name in product(targets, names):
                    table.ranked(name, Target(opset, opsets, runtime, exact))
            except RuleConflictError as error:
                if repr(record.distribution) in error.message:
                    yield "error", "conflict", f"{error.message} (opset {opset}). {error.hint}"
                    break


def _overloads(op: str, table: OnnxRegistry) -> list[str]:
    if packet_of(op) != op:
        return [op]
    return [op, *(name for name in table.operators() if packet_of(name) == op and name != op)]


def _samples(
    samples: Sequence[Any],
    rules: Sequence[Rule],
    record: PluginRecord,
    table: OnnxRegistry,
    manager: PluginManager,
    opsets: Sequence[int] | None,
) -> Iterator[_Row]:
    from onnxplug.verification.ready import newest_loadable_opset
    from onnxplug_tools.testing.samples import cases_of

    sampled = {packet_of(sample.op) for sample in samples}
    without = sorted({rule.op for rule in rules if packet_of(rule.op) not in sampled})
    if without and not record.is_builtin:
        yield "note", "sample", f"no sample of {', '.join(without[:8])}" + (" …" if len(without) > 8 else "")
    # Samples of a library that is not installed can't be checked: `absent library` is in the list already.
    samples = [sample for sample in samples if not _is_of_absent_library(sample.op, record)]
    passed: dict[str, set[int]] = {}
    reported: set[str] = set()
    cases = [c for c in cases_of(record.distribution, samples, rules) if opsets is None or c.opset in opsets]
    if samples and opsets is not None and not cases:
        yield "note", "sample", f"no sample holds at opset {' or '.join(map(str, opsets))}: none was run"
    for number, case in enumerate(cases):
        step(f"{record.name}, {case.sample.op} at opset {case.opset}", number, len(cases))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.check((table, manager))
        except OnnxplugError as error:
            if str(error) not in reported:  # an operator that torch doesn't know fails at each opset
                yield "error", "sample", str(error)
            reported.add(str(error))
        except Exception as error:
            yield "error", "sample", f"{case}: {type(error).__name__}: {error}"
        else:
            passed.setdefault(case.sample.op, set()).add(case.opset)
    limit = newest_loadable_opset() if cases else 0
    for op, opsets_passed in passed.items():
        ran = [o for o in opsets_passed if o <= limit]
        where = f"opset{'s' if len(ran) > 1 else ''} {_ranges(ran)}"
        text = f"{op} agrees with PyTorch at {where}" if ran else f"{op} converts"
        unrun = sorted(opsets_passed - set(ran))
        yield (
            "ok",
            "sample",
            text + (f"; converted but not run, ONNX Runtime is too old: {_ranges(unrun)}" if unrun else ""),
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Runs of numbers as ``13 to 20, 23``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
