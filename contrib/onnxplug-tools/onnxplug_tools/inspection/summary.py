"""A picture of a model as rows of tables, for the terminal and for a page."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from onnxplug.text import counted
from onnxplug_tools.inspection.dims import check_names, names_in, size_of
from onnxplug_tools.inspection.pages import page
from onnxplug_tools.inspection.view import ModelView, ModuleView, ValueView, WeightView
from onnxplug_tools.inspection.words import bytes_text, count_text, finite, flops_text, opsets_text

#: The most weights and nodes that a page lists.
_WEIGHTS_OF_A_PAGE, _NODES_OF_A_PAGE = 200, 20_000


def rows(seen: ModelView, file: str, sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    """The facts about the whole model, as names and values.

    Args:
        file: The name of its file, with its size.
        sizes: The sizes that the estimate of operations was made for.
    """
    bodies = sum(1 for node in seen.nodes if node.graph) - sum(function.nodes for function in seen.functions)
    within = f", {bodies} of them in the bodies of others" if bodies else ""
    dtypes = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in seen.bytes_by_dtype.items())
    functions = [f"{f.operator} ({counted(f.nodes, 'node')}, {counted(f.calls, 'call')})" for f in seen.functions]
    return [
        ("file", file),
        ("producer", seen.producer),
        ("opsets", opsets_text(seen.opsets)),
        *[("input", _value(value)) for value in seen.inputs],
        *[("output", _value(value)) for value in seen.outputs],
        ("nodes", f"{seen.root.total_nodes}{within}"),
        ("operators", ", ".join(f"{name} {count}" for name, count in seen.operators.items())),
        ("functions", ", ".join(functions) or "none"),
        (
            "weights",
            f"{counted(len(seen.weights), 'tensor')}, {count_text(seen.root.total_parameters)} elements: {dtypes or 'none'}",
        ),
        ("operations", operations_text(seen, sizes)),
    ]


def _value(value: ValueView) -> str:
    return f"{value.name} {value.type}"


def operations_text(seen: ModelView, sizes: Mapping[str, int]) -> str:
    """The estimate of operations, the sizes for which it was made, and the number of nodes that it leaves out."""
    root = seen.root
    missing = missing_names(seen, sizes)
    if root.total_unestimated and missing:
        option = ",".join(f"{name}=…" for name in missing)
        quoted = option if all(name.isidentifier() for name in missing) else shlex.quote(option)
        return f"not known without the sizes of dynamic dimensions: --sizes {quoted}"
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    text = f"{flops_text(root.total_flops)}, estimated{f' at {at}' if at else ''}"
    if not root.total_unestimated:
        return text
    left_out = f"{counted(root.total_unestimated, 'node')} that there is no estimate for"
    return f"{text}; without {left_out}" if root.total_flops else left_out


def missing_names(seen: ModelView, sizes: Mapping[str, int]) -> list[str]:
    """The names without a size that give dimensions of the inputs theirs, in their order."""
    dims = [dim for value in seen.inputs for dim in value.shape or () if isinstance(dim, str)]
    names = [name for dim in dims if size_of(dim, sizes) is None for name in sorted(names_in(dim) - {dim}) or [dim]]
    return [name for name in dict.fromkeys(names) if name not in sizes]


def check_sizes(seen: ModelView, sizes: Mapping[str, int]) -> None:
    """Checks that the model has dimensions of these names."""
    if not sizes:
        return
    values = [*seen.inputs, *seen.outputs, *(value for node in seen.nodes for value in (*node.inputs, *node.outputs))]
    dims = {dim for value in values for dim in value.shape or () if isinstance(dim, str)}
    check_names(sizes, dims, "no value of the model has")


def modules(seen: ModelView, depth: int) -> Iterator[tuple[int, ModuleView]]:
    """The modules down to a depth, each after the module around it, with its depth."""
    pending = [(0, seen.root)]
    while pending:
        level, module = pending.pop()
        yield level, module
        if level < depth:
            pending += [(level + 1, child) for child in reversed(module.children)]


def module_cells(module: ModuleView) -> list[str]:
    """The cells of a module's row after its name: class, nodes, parameters, bytes, operations."""
    operations = flops_text(module.total_flops)
    if module.total_unestimated:
        operations = f"{operations} + {counted(module.total_unestimated, 'node')}" if module.total_flops else "unknown"
    return [
        ", ".join(kind.rpartition(".")[2] for kind in module.classes),
        count_text(module.total_nodes),
        count_text(module.total_parameters),
        bytes_text(module.total_bytes),
        operations,
    ]


def largest(seen: ModelView, count: int) -> list[WeightView]:
    """The weights with the most bytes, the largest first."""
    return sorted(seen.weights, key=lambda weight: -weight.bytes)[:count]


def to_json(picture: Any) -> str:
    """A picture as JSON: the attributes of its classes by their names; NaN and infinities, which JSON lacks, are texts."""
    return json.dumps(finite(dataclasses.asdict(picture)), indent=1, allow_nan=False)


def to_html(seen: ModelView, title: str, facts: list[tuple[str, str]]) -> str:
    """A page with everything: modules, operators, weights, nodes.

    Args:
        facts: The rows of :func:`rows`.
    """
    import onnxplug

    return page(
        "model.html.jinja",
        {
            "title": title,
            "version": onnxplug.__version__,
            "model": seen,
            "module_cells": module_cells,
            "rows": facts,
            "most": max(seen.operators.values(), default=1),
            "weights": largest(seen, _WEIGHTS_OF_A_PAGE),
            "nodes": seen.nodes[:_NODES_OF_A_PAGE],
        },
    )
