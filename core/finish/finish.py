"""From a graph to an ``onnx_ir.Model``: initializers, functions, imports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx.helper
import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.names import Names
from onnxplug.build.scope import graphs_of, nodes_of, used_by
from onnxplug.build.stored import WeightTensor
from onnxplug.finish.empty import keep_empty
from onnxplug.version import VERSION

PRODUCER = "onnxplug"


def finish(
    g: GraphBuilder,
    graph: ir.Graph,
    tensors: Mapping[ir.Value, torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> ir.Model:
    """Makes the model of an assembled graph, rewritten or not.

    Args:
        g: The builder of the graph.
        graph: The graph; its initializers are registered here.
        tensors: The tensors of the values that the model's weights are stored in.
        metadata: The graph's metadata. The model itself gets none: tools that update a dictionary by it (ONNX Runtime's QNN
            preprocessing) fail on any.
    """
    keep_empty(graph, g.opset)
    used = _register_initializers(graph, {**tensors, **g.weights.derived_tensors()}, g.names)
    functions = _called(g.functions.defined.values(), used)
    _prune_imports(graph, used, functions)
    graph.metadata_props.update(metadata or {})
    return ir.Model(
        graph,
        ir_version=ir_version(g.opset),
        producer_name=PRODUCER,
        producer_version=VERSION,
        functions=functions,
    )


def ir_version(opset: int) -> int:
    """The oldest ONNX IR version that carries the opset; 8 at least, for model-local functions."""
    known = onnx.helper.OP_SET_ID_VERSION_MAP.get(("ai.onnx", opset))
    return max(8, int(known) if known is not None else 8)


def _register_initializers(graph: ir.Graph, tensors: Mapping[ir.Value, Any], names: Names) -> set[tuple[str, str]]:
    """Stores the state and the constants that nodes read; returns the operators, also of subgraphs."""
    seen: set[int] = set()
    used: set[tuple[str, str]] = set()
    for node in graph:
        used.add((node.domain, node.op_type))
        graphs = graphs_of(node)
        for inner in graphs:
            used.update((n.domain, n.op_type) for n in nodes_of(inner))
        for value in used_by(node) if graphs else node.inputs:
            if value is None or value.producer() is not None or id(value) in seen:
                continue
            seen.add(id(value))
            tensor = tensors.get(value)
            if isinstance(tensor, torch.Tensor):
                shape = value.shape if value.shape is not None and value.shape.frozen else None
                value.const_value = WeightTensor(tensor.detach(), value.name, shape)
            elif tensor is not None:
                tensor.name = value.name
                value.const_value = tensor
            if value.const_value is not None and not value.is_graph_input():
                if value.name is None:
                    value.name = names.unique("constant")
                graph.register_initializer(value)
    return used


def _called(known: Iterable[ir.Function], used: set[tuple[str, str]]) -> list[ir.Function]:
    """The functions that the graph calls, and in turn the functions that they call."""
    by_name = {(f.domain, f.name): f for f in known}
    called: dict[tuple[str, str], ir.Function] = {}
    pending = [name for name in by_name if name in used]
    while pending:
        name = pending.pop()
        if name in called:
            continue
        called[name] = by_name[name]
        pending.extend(n for node in nodes_of(by_name[name]) if (n := (node.domain, node.op_type)) in by_name)
    return [f for name, f in by_name.items() if name in called]


def _prune_imports(graph: ir.Graph, used: set[tuple[str, str]], functions: Sequence[ir.Function]) -> None:
    """Imports only the domains that the model uses; ai.onnx always."""
    domains = {domain for domain, _ in used} | {""}
    for function in functions:
        domains |= {node.domain for node in nodes_of(function)}
    for domain in list(graph.opset_imports):
        if domain not in domains:
            del graph.opset_imports[domain]
