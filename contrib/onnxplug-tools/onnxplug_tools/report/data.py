"""A report as JSON. docs/reports.md says what each key is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnxplug_tools.report.differences import DECADES

if TYPE_CHECKING:
    from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView
    from onnxplug_tools.report.record import Facts, Verification

#: Counted up when a key changes its meaning or is gone.
VERSION = 1
SCHEMA = f"onnxplug.report/{VERSION}"


def to_dict(report: Facts) -> dict[str, Any]:
    """See :meth:`ExportReport.to_dict`."""
    times = report.times
    return {
        "schema": SCHEMA,
        "status": report.status,
        "model": report.model,
        "began": report.began,
        "seconds": report.seconds,
        "failure": None if report.failure is None else asdict(report.failure),
        "versions": report.versions,
        "system": report.system,
        "plugins": [asdict(plugin) for plugin in report.plugins],
        "arguments": report.arguments,
        "opsets": report.opsets,
        "inputs": [{"name": name, "type": kind} for name, kind in report.inputs],
        "outputs": [{"name": name, "type": kind} for name, kind in report.outputs],
        "sizes": report.sizes,
        "capture": None if report.capture is None else asdict(report.capture),
        "decomposed": [asdict(item) for item in report.decomposed],
        "folded": report.folded,
        "rewrites": [asdict(item) for item in report.rewrites],
        "functions": report.functions,
        "packages": report.packages,
        "times": None
        if times is None
        else {
            "stages": [asdict(stage) for stage in times.stages()],
            "rules": [asdict(rule) for rule in times.rules()],
            "rewrites": [asdict(rewrite) for rewrite in times.rewrites()],
            "modules": [asdict(module) for module in times.modules()],
        },
        "verification": None if report.verification is None else _verification(report.verification),
        "warnings": [asdict(warned) for warned in report.warnings],
        "files": [asdict(file) for file in report.files],
        "tables": [asdict(table) for table in report.tables],
        "nodes": [] if report.view is None else [_node(node) for node in report.view.nodes],
        "modules": None if report.view is None else _module(report.view.root),
        "weights": None if report.view is None else _weights(report.view),
    }


def to_json(report: Facts) -> str:
    """See :meth:`ExportReport.json`. NaN and infinities, which JSON has not, are texts."""
    return json.dumps(_finite(to_dict(report)), indent=1, allow_nan=False, default=str) + "\n"


def _finite(item: Any) -> Any:
    if isinstance(item, float) and (item != item or item in (float("inf"), float("-inf"))):
        return str(item)
    if isinstance(item, dict):
        return {str(key): _finite(value) for key, value in item.items()}
    return [_finite(value) for value in item] if isinstance(item, list | tuple) else item


def _verification(verification: Verification) -> dict[str, Any]:
    return {
        "accepted": verification.error is None,
        "error": verification.error,
        "max_abs_difference": verification.max_abs_difference,
        "decades": list(DECADES),
        "histogram": asdict(verification.histogram),
        "cases": [asdict(case) | {"accepted": case.accepted} for case in verification.cases],
        "skipped": verification.skipped,
    }


def _node(node: NodeView) -> dict[str, Any]:
    return {
        "index": node.index,
        "name": node.name,
        "operator": node.operator,
        "graph": node.graph,
        "module": node.module,
        "inputs": [{"name": value.name, "type": value.type} for value in node.inputs],
        "outputs": [{"name": value.name, "type": value.type} for value in node.outputs],
        "attributes": node.attributes,
        "rule": node.rule,
        "package": node.package,
        "version": node.version,
        "source": node.source,
        "rewritten": list(node.rewritten),
        "flops": node.flops,
    }


def _module(module: ModuleView) -> dict[str, Any]:
    """A module and those in it; without recursion, for they may be nested a hundred deep."""
    made: dict[int, dict[str, Any]] = {}
    pending = [module]
    order = []
    while pending:
        found = pending.pop()
        order.append(found)
        pending.extend(found.children)
    for found in reversed(order):
        made[id(found)] = {
            "path": found.path,
            "classes": list(found.classes),
            "nodes": found.total_nodes,
            "parameters": found.total_parameters,
            "bytes": found.total_bytes,
            "flops": found.total_flops,
            "children": [made[id(child)] for child in found.children],
        }
    return made[id(module)]


def _weights(view: ModelView) -> dict[str, Any]:
    return {"count": len(view.weights), "bytes": view.root.total_bytes, "bytes_by_dtype": view.bytes_by_dtype}
