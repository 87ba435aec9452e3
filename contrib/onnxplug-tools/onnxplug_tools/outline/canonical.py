"""Canonical forms of nodes, which are equal for nodes that are the same but for the names of values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxplug.build.attributes import attribute_key
from onnxplug.build.scope import graphs_of, used_by
from onnxplug.build.stored import META

#: Constants of at most so many elements are part of a function; larger constants are inputs of it.
MAX_CONSTANT = 64
_KINDS = ir.AttributeType


def is_constant(value: ir.Value) -> bool:
    """Whether a value is a small constant, none of the model's weights: constants of the same content are the same."""
    content = value.const_value
    return (
        content is not None
        and value.producer() is None
        and not value.is_graph_input()
        and content.size <= MAX_CONSTANT
        and content.dtype != ir.DataType.STRING
        and META not in value.meta
    )


def read_by(node: ir.Node) -> list[ir.Value]:
    """The values from outside of a node that the node, its branches or its bodies read; each once."""
    if not graphs_of(node):
        return list(dict.fromkeys(v for v in node.inputs if v is not None))
    made = set(_made_within(node))
    return list(dict.fromkeys(v for v in used_by(node) if v not in made))


def _made_within(node: ir.Node) -> Iterable[ir.Value]:
    for graph in graphs_of(node):
        yield from graph.inputs
        for inner in graph:
            yield from inner.outputs
            yield from _made_within(inner)


@dataclass(frozen=True)
class Canonical:
    """Nodes in a form that is equal for nodes that compute the same from their inputs in the same way.

    Attributes:
        key: The form: operators, attributes, constants, and for each input of a node the common input, or the output
            of a node, that it reads.
        inputs: The values that the nodes read, without small constants; equal keys have them in the same order.
        outputs: The results of the nodes that are read by others, in the same order too.
        made: The results of every node, those in branches and bodies included, in the same order too.
    """

    key: Any
    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    made: Sequence[ir.Value]


def canonical(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> Canonical:
    """The canonical form of some nodes of one graph.

    Args:
        nodes: The nodes, in the order of the graph.
        outputs: The results of the nodes that are read by others, in the order of the nodes.
    """
    form = _Form()
    lines = [form.line(node) for node in _from_outputs(nodes, outputs)]
    shown = tuple(form.numbers[value] for value in outputs)
    return Canonical((tuple(lines), shown), form.inputs, outputs, form.made)


def _from_outputs(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes in an order that the outputs alone decide: producers first, in the order of a node's inputs."""
    inside = set(nodes)
    order: dict[ir.Node, None] = {}
    producers = (value.producer() for value in outputs)
    # Nodes that lead to no output come last, in the order of the graph.
    for start in (*producers, *nodes):
        pending: list[tuple[ir.Node, bool]] = [(start, False)] if start is not None else []
        while pending:
            node, ready = pending.pop()
            if node in order:
                continue
            if ready:
                order[node] = None
                continue
            pending.append((node, True))
            before = [value.producer() for value in read_by(node)]
            pending += ((n, False) for n in reversed(before) if n is not None and n in inside and n not in order)
    return list(order)


class _Form:
    """A canonical form in the making: every value has a number, in the order in which the values are met."""

    def __init__(self) -> None:
        self.numbers: dict[ir.Value, Any] = {}
        self.inputs: list[ir.Value] = []
        self.made: list[ir.Value] = []

    def line(self, node: ir.Node) -> Any:
        """The form of a node; its results have their numbers afterwards."""
        read = tuple(None if value is None else self._number(value) for value in node.inputs)
        attributes = tuple(
            (name, int(attr.type), self._attribute(attr)) for name, attr in sorted(node.attributes.items())
        )
        for value in node.outputs:
            self._make(value)
        return node.domain, node.op_type, node.overload, node.version, read, attributes, len(node.outputs)

    def _make(self, value: ir.Value) -> None:
        self.numbers[value] = len(self.made)
        self.made.append(value)

    def _number(self, value: ir.Value) -> Any:
        number = self.numbers.get(value)
        if number is None:
            if is_constant(value):
                content = value.const_value
                assert content is not None
                number = "constant", int(content.dtype), tuple(content.shape), content.tobytes()
            else:
                number = "input", len(self.inputs), value.dtype
                self.inputs.append(value)
            self.numbers[value] = number
        return number

    def _attribute(self, attr: ir.Attr) -> Any:
        if attr.is_ref() or attr.type not in (_KINDS.GRAPH, _KINDS.GRAPHS):
            key = attribute_key(attr)
            if attr.type == _KINDS.FLOATS and not attr.is_ref():  # 0.0 == -0.0
                return tuple((number, math.copysign(1.0, number)) for number in key)
            return key
        graphs = (attr.as_graph(),) if attr.type == _KINDS.GRAPH else attr.as_graphs()
        return tuple(self._graph(graph) for graph in graphs)

    def _graph(self, graph: ir.Graph) -> Any:
        for value in graph.inputs:
            self._make(value)
        types = tuple(value.dtype for value in graph.inputs)
        lines = tuple(self.line(node) for node in graph)
        return types, lines, tuple(self._number(value) for value in graph.outputs)


def outputs_of(
    nodes: Sequence[ir.Node], readers: Mapping[ir.Value, Sequence[ir.Node]], results: Collection[ir.Value]
) -> list[ir.Value]:
    """The results of some nodes of a graph that other nodes read, or that the graph returns.

    Args:
        readers: Value to the nodes of the graph that read it.
        results: The outputs of the graph.
    """
    inside = set(nodes)
    return [
        value
        for node in nodes
        for value in node.outputs
        if value in results or any(reader not in inside for reader in readers.get(value, ()))
    ]
