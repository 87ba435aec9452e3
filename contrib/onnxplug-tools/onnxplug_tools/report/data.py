"""A report as JSON. docs/reports.md describes each key."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from onnxplug_tools.inspection.words import finite
from onnxplug_tools.report.differences import DECADES

if TYPE_CHECKING:
    from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView
    from onnxplug_tools.report.record import Facts, Verification

#: Counted up when a key changes its meaning or is gone.
VERSION = 1
SCHEMA = f"onnxplug.report/{VERSION}"
#: The keys in their order; most are attributes of a report.
_KEYS = (
    "status model began seconds failure versions system plugins arguments opsets inputs outputs sizes capture decomposed folded "
    "rewrites functions packages times verification warnings files tables nodes modules weights"
).split()


def to_dict(report: Facts) -> dict[str, Any]:
    """See :meth:`ExportReport.to_dict`."""
    times, view = report.times, report.view
    tables = ("stages", "rules", "rewrites", "modules")
    written = {
        "inputs": [{"name": name, "type": kind} for name, kind in report.inputs],
        "outputs": [{"name": name, "type": kind} for name, kind in report.outputs],
        "times": None if times is None else {name: _plain(getattr(times, name)()) for name in tables},
        "verification": None if report.verification is None else _verification(report.verification),
        "nodes": [] if view is None else [_node(node) for node in view.nodes],
        "modules": None if view is None else _module(view.root),
        "weights": None if view is None else _weights(view),
    }
    return {"schema": SCHEMA} | {k: written[k] if k in written else _plain(getattr(report, k)) for k in _KEYS}


def _plain(item: Any) -> Any:
    if isinstance(item, list):
        return [_plain(value) for value in item]
    return asdict(item) if is_dataclass(item) else item  # type: ignore[arg-type]


def to_json(report: Facts) -> str:
    """See :meth:`ExportReport.json`. NaN and infinities, which JSON lacks, are texts."""
    return json.dumps(finite(to_dict(report)), indent=1, allow_nan=False, default=str) + "\n"


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
    """A module and its submodules, which :mod:`onnxplug_tools.inspection.places` nests a hundred deep at most."""
    return {
        "path": module.path,
        "classes": list(module.classes),
        "nodes": module.total_nodes,
        "parameters": module.total_parameters,
        "bytes": module.total_bytes,
        "flops": module.total_flops,
        "children": [_module(child) for child in module.children],
    }


def _weights(view: ModelView) -> dict[str, Any]:
    return {"count": len(view.weights), "bytes": view.root.total_bytes, "bytes_by_dtype": view.bytes_by_dtype}
