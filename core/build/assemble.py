"""From emitted nodes to a graph: outputs of their own, dead nodes gone, everything named."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import SINCE
from onnxplug.build.names import Names
from onnxplug.build.provenance import Provenance
from onnxplug.build.scope import graphs_of, used_by
from onnxplug.errors import Unsupported


def assemble(
    g: GraphBuilder,
    inputs: Sequence[ir.Value],
    outputs: Sequence[tuple[str, Any]],
    state: Mapping[ir.Value, torch.Tensor],
) -> tuple[ir.Graph, dict[ir.Value, torch.Tensor]]:
    """Makes the graph of the emitted nodes: only nodes that the outputs need, every value named.

    Args:
        g: The builder, everything emitted.
        inputs: Graph inputs, named.
        outputs: Name and value (or number) of each graph output.
        state: Values that are parameters, buffers and constants of the model, named, with their tensors.

    Returns:
        The graph, without initializers, and the tensors of the values that the model's weights are stored in.

    Raises:
        Unsupported: A value has an element type that the opset lacks.
    """
    results = _distinct_outputs(g, inputs, outputs, state)
    nodes = g.scope.live(results)
    tensors: dict[ir.Value, torch.Tensor] = dict(state)
    # The user's names (inputs, outputs, state) come first and stay.
    g.names.take(v.name for v in (*inputs, *results, *tensors))
    g.names.take(g.weights.state_names())
    derived = g.weights.derived_tensors()
    _name_values(g.names, nodes, {id(v) for v in results})
    stored = (v for v in (*tensors, *derived) if v.uses())
    _refuse_newer_dtypes(g, chain(inputs, stored, (v for node in nodes for v in node.outputs)))
    return ir.Graph(inputs, results, nodes=nodes, opset_imports=dict(g.opsets), name="main_graph"), tensors


def _distinct_outputs(
    g: GraphBuilder, inputs: Sequence[ir.Value], outputs: Sequence[tuple[str, Any]], state: Mapping[ir.Value, Any]
) -> list[ir.Value]:
    """Each output a value of its own: ONNX wants neither an input nor a constant nor the same value twice."""
    taken = {id(v) for v in inputs}
    results = []
    for name, value in outputs:
        if not isinstance(value, ir.Value):
            value = g.const(value)
        if id(value) in taken or value.producer() is None or value in state:
            producer = value.producer()
            of_output = Provenance(name, "output")
            with g.provenance.converting(None, g.provenance.of[producer] if producer is not None else of_output):
                value = g.scope.identity(value)
        taken.add(id(value))
        value.name = name
        if value.shape is not None:  # a shape of its own, that the user may change
            value.shape = value.shape.copy()
        results.append(value)
    return results


def _refuse_newer_dtypes(g: GraphBuilder, values: Iterable[ir.Value]) -> None:
    newer = {dtype for dtype, since in SINCE.items() if since > g.opset}
    if not newer:
        return
    for value in values:
        if value.dtype in newer:
            assert value.dtype is not None
            producer = value.producer()
            source = g.provenance.of[producer].location if producer is not None else None
            raise Unsupported(
                f"{value.name!r}{f' at {source}' if source else ''} is of {value.dtype.name.lower()}, which ai.onnx {g.opset} "
                "does not have",
                hint=f"Export for opset {SINCE[value.dtype]} or later.",
            )


def _name_values(names: Names, nodes: Iterable[ir.Node], named: Container[int]) -> None:
    """Names the results of nodes and the constants that they read; outputs of the graph have their names."""
    constants = 0
    for node in nodes:
        for value in node.outputs:
            if id(value) not in named:
                value.name = names.unique(value.name or f"{node.op_type.lower()}_value")
        graphs = graphs_of(node)
        if graphs:
            _name_within(graphs, names.unique)
        for read in used_by(node) if graphs else node.inputs:
            if read is not None and read.const_value is not None and read.name is None:
                constants += 1
                read.name = names.unique(f"constant_{constants}")


def _name_within(graphs: Iterable[ir.Graph], unique: Callable[[str], str]) -> None:
    """Names the results within subgraphs: they see the names of the graph around them and must not reuse any."""
    for graph in graphs:
        for value in graph.inputs:
            value.name = unique(value.name or "graph_input")
        for inner in graph:
            for value in inner.outputs:
                value.name = unique(value.name or f"{inner.op_type.lower()}_value")
            _name_within(graphs_of(inner), unique)
