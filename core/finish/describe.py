"""Nodes' names, and the metadata of nodes and values about their origins."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxplug.build.names import Names
from onnxplug.build.provenance import ALL_KEYS, CLASS, FULL_ALONE, MODULE_CALL, NOWHERE, Provenance
from onnxplug.build.scope import graphs_of, nodes_of

#: Value to its metadata.
ValueMetadata = Mapping[ir.Value, Mapping[str, str]]


def describe(
    model: ir.Model,
    provenance_of: Mapping[ir.Node, Provenance],
    *,
    full: bool | None,
    values: ValueMetadata | None = None,
) -> None:
    """Names every node after its module and its operator, and writes the metadata of nodes and values.

    Args:
        model: The model, complete; it is changed.
        provenance_of: The origins of its nodes, including the nodes of its functions.
        full: Everything; ``False`` the metadata that a model is shipped with; ``None`` only names.
        values: The metadata of values.
    """
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        _describe(graph, provenance_of, full, Names())
    for value, metadata in (values or {}).items():
        value.metadata_props.update(metadata)


def _describe(graph: ir.Graph, provenance_of: Mapping[ir.Node, Provenance], full: bool | None, names: Names) -> None:
    for node in graph:
        op_type = node.op_type
        provenance = provenance_of.get(node, NOWHERE)
        place = provenance.place
        node.name = names.unique(provenance.words or (f"{place}/{op_type}" if place else op_type))
        if full is not None:
            node.metadata_props.update(provenance.metadata(full))
        if provenance.call is not None:
            node.metadata_props[MODULE_CALL] = provenance.call
        for inner in graphs_of(node):
            _describe(inner, provenance_of, full, names)


def forget(model: ir.Model, *, full: bool | None) -> None:
    """Removes metadata beyond the requested level from nodes and functions that were described in full.

    Args:
        model: The model; it is changed.
        full: As for :func:`describe`.
    """
    if full:
        return
    keys = ALL_KEYS if full is None else FULL_ALONE
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if full is None:
            graph.metadata_props.pop(CLASS, None)
        for node in nodes_of(graph):
            for key in keys:
                node.metadata_props.pop(key, None)
