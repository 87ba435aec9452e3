"""One graph under construction: its nodes in order, and which results are already there to be shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS
#: The operators of ai.onnx that have subgraphs.
_WITH_SUBGRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})

Mark = int


class Scope:
    """Nodes of a graph or subgraph, with the table of pure nodes by their inputs and attributes.

    A subgraph may share what the graphs around it have made; what it makes itself is not visible outside.
    """

    __slots__ = ("_keys", "_seen", "isolated", "nodes", "outer")

    def __init__(self, outer: Scope | None, *, isolated: bool = False) -> None:
        self.outer = outer
        self.isolated = isolated
        self.nodes: list[ir.Node] = []
        self._keys: list[Any] = []
        self._seen: dict[Any, tuple[ir.Value, ...]] = {}

    def lookup(self, key: Any) -> tuple[ir.Value, ...] | None:
        """The outputs of an equal node made earlier, here or around."""
        scope: Scope | None = self
        while scope is not None:
            found = scope._seen.get(key)
            if found is not None:
                return found
            scope = None if scope.isolated else scope.outer
        return None

    def add(self, node: ir.Node, key: Any, outputs: tuple[ir.Value, ...]) -> None:
        """Appends a node; ``key`` is ``None`` for one that must not be shared."""
        self.nodes.append(node)
        self._keys.append(key)
        if key is not None:
            self._seen[key] = outputs

    def mark(self) -> Mark:
        """The number of nodes so far."""
        return len(self.nodes)

    def rollback(self, mark: Mark) -> list[ir.Value]:
        """Removes the nodes after ``mark`` and returns the values that went with them."""
        removed: list[ir.Value] = []
        while len(self.nodes) > mark:
            node, key = self.nodes.pop(), self._keys.pop()
            if key is not None:
                self._seen.pop(key, None)
            detach(node)
            removed.extend(node.outputs)
        return removed

    def values(self) -> Iterator[ir.Value]:
        """Every value that the scope's nodes make."""
        for node in self.nodes:
            yield from node.outputs

    def live_nodes(self, outputs: Iterable[ir.Value], dead: list[ir.Value] | None = None) -> list[ir.Node]:
        """The nodes that the outputs need, in order; the others let go of their inputs. Linear in the graph.

        Args:
            outputs: What is needed.
            dead: Takes what the other nodes made.
        """
        needed = set(map(id, outputs))
        live: list[ir.Node] = []
        for node in reversed(self.nodes):
            if needed.isdisjoint(map(id, node.outputs)):
                detach(node)
                if dead is not None:
                    dead.extend(node.outputs)
            else:
                live.append(node)
                needed.update(map(id, used_by(node) if may_have_graphs(node) else node.inputs))
        live.reverse()
        return live


def detach(node: ir.Node) -> None:
    """Takes a node that won't be in the graph off its inputs' lists of uses."""
    for index, value in enumerate(node.inputs):
        if value is not None:
            node.replace_input_with(index, None)


def used_by(node: ir.Node) -> Iterator[ir.Value]:
    """The values a node reads, those that its subgraphs take from outside included."""
    pending: list[ir.Node] = [node]
    while pending:
        current = pending.pop()
        for value in current.inputs:
            if value is not None:
                yield value
        for graph in graphs_of(current):
            pending.extend(graph)
            yield from graph.outputs


def may_have_graphs(node: ir.Node) -> bool:
    """Whether an attribute of a node may be a graph."""
    return node.op_type in _WITH_SUBGRAPHS or bool(node.domain)


def graphs_of(node: ir.Node) -> Sequence[ir.Graph]:
    """The graphs that a node's attributes hold: branches, bodies."""
    if not may_have_graphs(node):
        return ()
    found: list[ir.Graph] = []
    for attr in node.attributes.values():
        kind = attr.type
        if (kind is _GRAPH or kind is _GRAPHS) and not attr.is_ref():
            found += (attr.as_graph(),) if kind is _GRAPH else attr.as_graphs()
    return found


def nodes_of(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Every node of a graph, those of its subgraphs included."""
    for node in graph:
        yield node
        if node.op_type in _WITH_SUBGRAPHS or node.domain:
            for inner in graphs_of(node):
                yield from nodes_of(inner)
