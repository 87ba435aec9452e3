"""A reviewer's questions about a plugin and the library that it is for: ``onnxplug plugins check``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from onnxplug.errors import OnnxplugError, PluginError, UsageError
from onnxplug.plugin_api import CaptureRequest, OrtLibrary
from onnxplug.plugins.patches import PluginPatch
from onnxplug.plugins.records import PluginRecord
from onnxplug.plugins.runtime import PluginRuntime, reference_kernels
from onnxplug.registry.names import packet_of, without_prefix
from onnxplug.text import counted
from onnxplug_tools.library.operators import LibraryOperator, import_library, is_installed, operators_of

#: Severity, kind and message of a finding.
Row = tuple[str, str, str]
_LISTED = 20


def library_rows(record: PluginRecord, supplied: dict[str, Any]) -> Iterator[Row]:
    """The findings on a plugin and its libraries."""
    yield from _versions(record)
    yield from _operators(record, supplied)
    yield from _runtime(record, supplied)


def _libraries(record: PluginRecord) -> list[str]:
    """The libraries of a plugin that are installed, by import name; not the plugin's own package."""
    own = record.value.partition(":")[0].partition(".")[0]
    names = dict.fromkeys((*record.libraries, *record.namespaces))
    return [name for name in names if name != own and is_installed(name)]


def _versions(record: PluginRecord) -> Iterator[Row]:
    """Libraries for which neither the plugin nor its distribution states a version."""
    try:
        declared = requires(record.distribution) or ()
    except PackageNotFoundError:
        declared = ()
    stated = {canonicalize_name(r.name) for r in map(Requirement, (*declared, *record.requires)) if r.specifier}
    providers = packages_distributions()
    for library in _libraries(record):
        names = providers.get(library.partition(".")[0], ())
        if names and not stated & set(map(canonicalize_name, names)):
            yield (
                "note",
                "versions",
                f"no version of {names[0]} is stated: PluginInfo(requires=['{names[0]}>=…']), and the dependencies of the package",
            )


def _operators(record: PluginRecord, supplied: dict[str, Any]) -> Iterator[Row]:
    """Operators without a translation, without a sample or without a fake kernel."""
    decomposed = [op for op, function in supplied.get("onnxplug_decompositions", {}).items() if function is not None]
    rules = [without_prefix(rule.op) for rule in supplied.get("onnxplug_rules", ())]
    sampled = {packet_of(sample.op) for sample in supplied.get("onnxplug_samples", ())}
    if without := sorted({packet_of(op) for op in decomposed} - sampled):
        yield "note", "sample", f"no sample of {_listed(without)}, which it decomposes"
    for library in _libraries(record):
        try:
            import_library(library)
        except UsageError as error:
            yield "note", "library", error.message
    known = {op.packet: op for op in operators_of(record.namespaces)}
    translated = {packet_of(op) for op in (*rules, *decomposed, *record.replaced)} & set(known)
    needed = {packet for packet, op in known.items() if op.needs_rule and op.runs_on_cpu} | translated
    if not needed:
        return
    left, spaces = sorted(needed - translated), ", ".join(record.namespaces)
    if left:
        yield (
            "note",
            "operators",
            f"{len(left)} of the {len(needed)} operators of {spaces} have no rule: {_listed(left)}",
        )
    else:
        yield "ok", "operators", f"{counted(len(needed), 'operator')} of {spaces}: each has a rule"
    yield from _fakes(record, supplied, translated)


def _fakes(record: PluginRecord, supplied: dict[str, Any], translated: Collection[str]) -> Iterator[Row]:
    """Operators whose results have unknown shapes, even under the plugin's patches."""
    import torch

    with ExitStack() as held:
        for patch in supplied.get("onnxplug_patches", ()):
            try:
                made = PluginPatch(patch, record.label)(torch.nn.Identity(), CaptureRequest())
                if isinstance(made, AbstractContextManager):
                    held.enter_context(made)
            except OnnxplugError as error:
                yield "error", "patch", error.message
        lacking = sorted(op.packet for op in operators_of(record.namespaces) if _lacks_fake(op, translated))
    if lacking:
        yield (
            "note",
            "fake",
            f"torch knows no shapes of the results of {_listed(lacking)}: register fake kernels in onnxplug_patches()",
        )


def _lacks_fake(op: LibraryOperator, translated: Collection[str]) -> bool:
    return op.packet in translated and op.needs_rule and not op.has_fake


def _runtime(record: PluginRecord, supplied: dict[str, Any]) -> Iterator[Row]:
    """Libraries and kernels that can't be loaded."""
    items = supplied.get("onnxplug_runtime", [])
    domains = tuple(domain.name for domain in supplied.get("onnxplug_domains", ()))
    problems: list[Row] = []
    for item in items:
        if isinstance(item, OrtLibrary):
            problems += _library_problems(item)
    try:
        reference_kernels(domains, [PluginRuntime(record.label, domains, tuple(items))])
    except OnnxplugError as error:
        problems.append(("error", "runtime", error.message))
    yield from problems
    if items and not problems:
        yield "ok", "runtime", f"{counted(len(items), 'item')}: all load"


def _library_problems(library: OrtLibrary) -> Iterator[Row]:
    from onnxplug.run.kernels import onnxruntime_module

    try:
        path = library.path() if callable(library.path) else library.path
        if path is None:
            yield "note", "runtime", "the library of ONNX Runtime is not for this machine"
        elif not os.path.isfile(path):
            yield "error", "runtime", f"the library {os.fspath(path)} is not there"
        else:
            onnxruntime_module().SessionOptions().register_custom_ops_library(os.fspath(path))
    except Exception as error:
        text = error.message if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        yield "error", "runtime", f"the library {library.path} can't be loaded: {text}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
