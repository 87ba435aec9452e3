"""The differences between two models as rows of tables, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator

from onnxplug_tools.inspection.diff import ModelDiff, WeightChange
from onnxplug_tools.inspection.pages import page
from onnxplug_tools.inspection.view import NodeView, ValueView, WeightView
from onnxplug_tools.inspection.words import bytes_text, count_text

Row = tuple[str, ...]


def summary_rows(difference: ModelDiff) -> Iterator[Row]:
    """Differences of the models as wholes: a name, and the value of each model."""
    before, after = difference.before, difference.after
    for name, one, other in (
        ("producer", before.producer, after.producer),
        ("nodes", count_text(before.root.total_nodes), count_text(after.root.total_nodes)),
        ("elements of weights", count_text(before.root.total_parameters), count_text(after.root.total_parameters)),
        ("bytes of weights", bytes_text(before.root.total_bytes), bytes_text(after.root.total_bytes)),
    ):
        if one != other:
            yield name, one, other
    for domain, versions in difference.opsets.items():
        yield f"opset of {domain or 'ai.onnx'}", *["none" if version is None else str(version) for version in versions]
    for kind, changes in (("input", difference.inputs), ("output", difference.outputs)):
        for change in changes:
            yield kind, _value(change.before), _value(change.after)
    for text in difference.connections:
        yield "connection", *text.split(", then ", 1)
    for name, is_after in difference.functions.items():
        yield "function", *(("none", name) if is_after else (name, "none"))
    yield from difference.signatures
    for operator, (one_count, other_count) in difference.operators.items():
        yield operator, str(one_count), str(other_count)


def node_rows(difference: ModelDiff) -> Iterator[Row]:
    """Nodes that differ: module, ``-``, ``+`` or ``~``, the node, and its differences."""
    for module in difference.modules:
        place = module.path or "(the model)"
        if module.graph:
            place += f" in {module.graph}"
        for node in module.removed:
            yield place, "-", _node(node), ""
        for node in module.added:
            yield place, "+", _node(node), ""
        for change in module.changed:
            name = change.before.name
            if change.after.name != name:
                name = f"{name} → {change.after.name}"
            yield place, "~", f"{change.before.operator} {name}", "; ".join(change.what)


def weight_rows(difference: ModelDiff) -> Iterator[Row]:
    """Weights that differ: the weight of each model, and the difference."""
    for change in difference.weights:
        yield _weight(change.before), _weight(change.after), _what(change)


def _what(change: WeightChange) -> str:
    if change.before is None or change.after is None:
        return "only before" if change.after is None else "only after"
    parts = []
    if change.before.dtype != change.after.dtype:
        parts.append("other dtype")
    if change.transposed:
        parts.append("transposed")
    elif change.before.shape != change.after.shape:
        parts.append("other shape")
    if change.difference is not None:
        parts.append(str(change.difference))
    return "; ".join(parts) or "other text"


def _node(node: NodeView) -> str:
    results = ", ".join(f"{value.name} {value.type}" for value in node.outputs if value.name)
    return f"{node.operator} {node.name} → {results}" if node.name else f"{node.operator} → {results}"


def _value(value: ValueView | None) -> str:
    return "none" if value is None else f"{value.name} {value.type}"


def _weight(weight: WeightView | None) -> str:
    return "" if weight is None else f"{weight.name} {weight.type}"


def to_html(difference: ModelDiff, before: str, after: str) -> str:
    """A page with all differences."""
    import onnxplug

    return page(
        "diff.html.jinja",
        {
            "title": f"{before} → {after}",
            "version": onnxplug.__version__,
            "diff": difference,
            "summary": list(summary_rows(difference)),
            "nodes": list(node_rows(difference)),
            "weights": list(weight_rows(difference)),
        },
    )
