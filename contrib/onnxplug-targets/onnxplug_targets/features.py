"""Features of a node by which a provider takes it or not: types, ranks, constants, attributes, inputs, results."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

#: Attributes that give places, numbers, seeds or axes, not modes.
_NO_MODES = {
    "axis",
    "end",
    "equation",
    "num_scan_inputs",
    "group",
    "num_groups",
    "seed",
    "dtype",
    "to",
    "hidden_size",
    "sample_size",
    "batch_axis",
    "start",
}


#: Features beside types and attributes that count as refused where the provider was not asked.
STRICT = frozenset({"dynamic", "outer values", "unknown rank"})


def must_be_known(feature: str) -> bool:
    """Whether a node with a feature counts as refused where no node with it was taken."""
    return "=" in feature or feature in STRICT


def since_of(node: ir.Node, opset: int) -> int | None:
    """The version of a node's operator; ``None`` where ONNX does not define it."""
    schema = _schema(node.op_type, node.domain, opset)
    return None if schema is None else int(schema.since_version)


def features(node: ir.Node, opset: int) -> frozenset[str]:
    """The features of a node: ``"T=float"``, ``"input 1 computed"``, ``"rank 0"``, ``"dynamic"``, ``"mode=linear"`` …

    Args:
        node: A node of ai.onnx.
        opset: The version of ai.onnx.
    """
    schema = _schema(node.op_type, node.domain, opset)
    names = frozenset(_all(node, schema))
    return names if names & {"dynamic", "unknown rank"} else names | {"static"}


def _all(node: ir.Node, schema: Any) -> Iterator[str]:
    outputs = [value for value in node.outputs if value.name]
    yield f"{len(outputs)} results"
    for index in range(len(schema.inputs)):
        if index >= len(node.inputs) or node.inputs[index] is None:
            yield f"no input {index}"
    for formals, values in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for index, value in enumerate(values):
            formal = formals[min(index, len(formals) - 1)] if formals else None
            if value is None or formal is None or formal.type_str.startswith("tensor("):
                continue
            if value.name and value.dtype is not None:
                yield f"{formal.type_str}={value.dtype.name.lower()}"
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        if is_constant(value):
            yield f"input {min(index, len(schema.inputs) - 1)} constant"
        else:
            yield f"input {min(index, len(schema.inputs) - 1)} computed"
            yield from _shape(value)
    for value in outputs:
        yield from _shape(value)
    for index, value in enumerate(node.inputs[:2]):
        if value is not None and value.shape is not None:
            yield f"input {index} of rank {len(value.shape)}"
    if any(_reads_outer_values(graph) for graph in graphs_of(node)):
        yield "outer values"
    yield from _modes(node, schema)


def _modes(node: ir.Node, schema: Any) -> Iterator[str]:
    for name, definition in schema.attributes.items():
        value = node.attributes[name].value if name in node.attributes else _default(definition)
        if isinstance(value, bytes):
            value = value.decode()
        if name not in _NO_MODES and (isinstance(value, str) or (isinstance(value, int) and value in (0, 1, 2))):
            yield f"{name}={value}"


def _shape(value: ir.Value) -> Iterator[str]:
    if value.shape is None:
        yield "unknown rank"
        return
    sizes = list(value.shape)
    if len(sizes) == 0 or len(sizes) > 4:
        yield f"rank {len(sizes)}"
    if any(not isinstance(size, int) for size in sizes):
        yield "dynamic"
    if 0 in sizes:
        yield "empty"


def graphs_of(node: ir.Node) -> list[ir.Graph]:
    """The subgraphs of a node."""
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def _reads_outer_values(graph: ir.Graph) -> bool:
    """Whether a subgraph reads computed values of the graphs around it."""
    own = set(graph.inputs)
    nodes = list(graph.all_nodes())
    own.update(value for node in nodes for inner in graphs_of(node) for value in inner.inputs)
    own.update(value for node in nodes for value in node.outputs)
    read = {value for node in nodes for value in node.inputs if value is not None} | set(graph.outputs)
    return any(value not in own and not is_constant(value) for value in read)


def is_constant(value: ir.Value) -> bool:
    """Whether a value is an initializer that isn't an input too, or a constant."""
    producer = value.producer()
    if producer is not None:
        return producer.op_type == "Constant" and not producer.domain
    return value.is_initializer() and not value.is_graph_input()


def _default(definition: Any) -> Any:
    import onnx

    default = definition.default_value
    return onnx.helper.get_attribute_value(default) if default.name else None


@functools.cache
def _schema(op_type: str, domain: str, opset: int) -> Any:
    import onnx

    try:
        return onnx.defs.get_schema(op_type, opset, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None
