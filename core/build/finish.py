"""From emitted nodes to an ``onnx_ir.Model``: outputs, dead nodes, folded weights, rewrites, names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx.helper
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import SINCE
from onnxplug.build.scope import graphs_of, used_by
from onnxplug.errors import Unsupported
from onnxplug.rewrite.driver import run_rewrites

PRODUCER = "onnxplug"


def ir_version(opset: int) -> int:
    """The oldest ONNX IR version that carries the opset; 8 at least, for model-local functions."""
    known = onnx.helper.OP_SET_ID_VERSION_MAP.get(("ai.onnx", opset))
    return max(8, int(known) if known is not None else 8)


def finish(
    g: GraphBuilder,
    inputs: Sequence[ir.Value],
    outputs: Sequence[tuple[str, Any]],
    state: Mapping[ir.Value, torch.Tensor],
    *,
    rewrites: Iterable[Any] = (),
    metadata: Mapping[str, str] | None = None,
) -> ir.Model:
    """Builds the model.

    Args:
        g: The builder, everything emitted.
        inputs: Graph inputs, named.
        outputs: Name and value (or number) of each graph output.
        state: Values that are parameters, buffers and constants of the model, named, with their tensors.
        rewrites: Rewrites to run when the builder optimises.
        metadata: Metadata of the model.
    """
    results = _distinct_outputs(g, inputs, outputs, state)
    nodes = g._scope.live_nodes(results)
    tensors: dict[ir.Value, torch.Tensor] = dict(state)
    if g.optimize:
        nodes = _fold_transposed_weights(nodes, tensors, {id(v) for v in results})
    derived = g.derived_tensors(v.name for v in (*inputs, *results, *tensors))
    _name_values(nodes, inputs, results, [*tensors, *derived])
    stored = (v for v in (*tensors, *derived) if v.uses())
    _refuse_newer_dtypes(g.opset, [*inputs, *stored, *(v for node in nodes for v in node.outputs)])
    graph = ir.Graph(inputs, results, nodes=nodes, opset_imports=dict(g.opsets), name="main_graph")
    if g.optimize:
        run_rewrites(g, graph, rewrites)
        # A rewrite may have derived others.
        derived = g.derived_tensors(_names(graph, tensors))
    _register_initializers(graph, {**tensors, **derived})
    used = {(node.domain, node.op_type) for node in graph.all_nodes()}
    functions = _called(g.functions.values(), used)
    _prune_imports(graph, used, functions)
    return ir.Model(
        graph,
        ir_version=ir_version(g.opset),
        producer_name=PRODUCER,
        producer_version=_version(),
        functions=functions,
        metadata_props=dict(metadata or {}),
    )


def _version() -> str:
    import onnxplug

    return onnxplug.__version__


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
            value = g._identity(value)
        taken.add(id(value))
        value.name = name
        results.append(value)
    return results


def _fold_transposed_weights(
    nodes: Sequence[ir.Node], tensors: dict[ir.Value, torch.Tensor], outputs: set[int]
) -> list[ir.Node]:
    """A weight that is only ever read transposed is stored transposed; a tied one is stored once, as it is."""
    kept = []
    for node in nodes:
        source = node.inputs[0] if node.op_type == "Transpose" and not node.domain else None
        if source is None or source not in tensors or len(source.uses()) != 1 or id(node.outputs[0]) in outputs:
            kept.append(node)
            continue
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(tensors[source].dim())[::-1]
        result = node.outputs[0]
        folded = ir.Value(name=source.name, type=result.type, shape=result.shape)
        folded.metadata_props["onnxplug.transposed"] = ",".join(map(str, perm))
        tensors[folded] = tensors.pop(source).permute(*perm)
        result.replace_all_uses_with(folded)
        node.replace_input_with(0, None)
    return kept


def _refuse_newer_dtypes(opset: int, values: Iterable[ir.Value]) -> None:
    newer = {dtype for dtype, since in SINCE.items() if since > opset}
    if not newer:
        return
    for value in values:
        if value.dtype in newer:
            assert value.dtype is not None
            made = value.producer()
            source = made.metadata_props.get("pkg.onnxplug.source") if made is not None else None
            raise Unsupported(
                f"{value.name!r}{f' at {source}' if source else ''} is of {value.dtype.name.lower()}, which ai.onnx {opset} "
                "does not have",
                hint=f"Export for opset {SINCE[value.dtype]} or later.",
            )


def _name_values(
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    tensors: Sequence[ir.Value],
) -> None:
    """Names what has none yet; the user's names (inputs, outputs, state) come first and stay."""
    taken = {v.name for v in inputs} | {v.name for v in outputs} | {v.name for v in tensors}
    own = {id(v) for v in (*inputs, *outputs, *tensors)}
    counters: dict[str, int] = {}

    def unique(stem: str) -> str:
        name = stem
        while name in taken:
            number = counters[stem] = counters.get(stem, 0) + 1
            name = f"{stem}_{number}"
        taken.add(name)
        return name

    constants = 0
    for node in nodes:
        for value in node.outputs:
            if id(value) not in own:
                value.name = unique(value.name or f"{node.op_type.lower()}_value")
        node.name = f"node_{node.outputs[0].name}"
        graphs = graphs_of(node)
        if graphs:
            _name_within(graphs, unique)
        for read in used_by(node) if graphs else node.inputs:
            if read is not None and read.const_value is not None and read.name is None:
                constants += 1
                read.name = unique(f"constant_{constants}")


def _name_within(graphs: Iterable[ir.Graph], unique: Callable[[str], str]) -> None:
    """Names what graphs within the graph make: a name is visible in them, where it must not be made again."""
    for graph in graphs:
        for value in graph.inputs:
            value.name = unique(value.name or "graph_input")
        for inner in graph:
            for value in inner.outputs:
                value.name = unique(value.name or f"{inner.op_type.lower()}_value")
            inner.name = f"node_{inner.outputs[0].name}"
            _name_within(graphs_of(inner), unique)


def _names(graph: ir.Graph, tensors: Iterable[ir.Value]) -> Iterator[str | None]:
    yield from (value.name for value in (*graph.inputs, *tensors))
    yield from (
        value.name for node in graph.all_nodes() for value in (*node.inputs, *node.outputs) if value is not None
    )


def _register_initializers(graph: ir.Graph, tensors: Mapping[ir.Value, Any]) -> None:
    """Stores the state and the constants that nodes read."""
    seen: set[int] = set()
    for node in graph:
        for value in used_by(node) if graphs_of(node) else node.inputs:
            if value is None or id(value) in seen or value.producer() is not None:
                continue
            seen.add(id(value))
            tensor = tensors.get(value)
            if isinstance(tensor, torch.Tensor):
                value.const_value = TorchTensor(tensor.detach(), name=value.name)
            elif tensor is not None:
                tensor.name = value.name
                value.const_value = tensor
            if value.const_value is not None and not value.is_graph_input():
                if value.name is None:
                    value.name = f"constant_{len(seen)}r"
                graph.register_initializer(value)


def _called(known: Iterable[ir.Function], used: set[tuple[str, str]]) -> list[ir.Function]:
    """The functions that the graph calls, and those that they call in turn."""
    by_name = {(f.domain, f.name): f for f in known}
    found: dict[tuple[str, str], ir.Function] = {}
    pending = [name for name in by_name if name in used]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = by_name[name]
        pending.extend(n for node in by_name[name].all_nodes() if (n := (node.domain, node.op_type)) in by_name)
    return [f for name, f in by_name.items() if name in found]


def _prune_imports(graph: ir.Graph, used: set[tuple[str, str]], functions: Sequence[ir.Function]) -> None:
    """Imports only what the model uses; ai.onnx always."""
    domains = {domain for domain, _ in used} | {""}
    for function in functions:
        domains |= {node.domain for node in function.all_nodes()}
    for domain in list(graph.opset_imports):
        if domain not in domains:
            del graph.opset_imports[domain]
