"""Graphs under construction: their nodes in order, the results that equal nodes share, and the subgraphs within them.

An example, ``c = x.cos(); torch.cond(p, lambda x: x.sin() + x.cos(), lambda x: x.sin() * 2, (x,))``::

    graph           Cos(x), If(p)
    then_branch     Sin(x), Add(sin, cos)       its cosine is the node of the graph around it
    else_branch     Sin(x), Mul(sin_1, 2)       its sine is its own: no value of a branch is visible in the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.provenance import Provenances
from onnxplug.build.sizes import Sizes

_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS
#: The operators of ai.onnx that have subgraphs.
_WITH_SUBGRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


class Scope:
    """Nodes of a graph or subgraph, with the table of pure nodes by their inputs and attributes.

    A subgraph may share results of the graphs around it; its own results are not visible outside.
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
            outputs = scope._seen.get(key)
            if outputs is not None:
                return outputs
            scope = None if scope.isolated else scope.outer
        return None

    def add(self, node: ir.Node, key: Any, outputs: tuple[ir.Value, ...]) -> None:
        """Appends a node; ``key`` is ``None`` for a node that must not be shared."""
        self.nodes.append(node)
        self._keys.append(key)
        if key is not None:
            self._seen[key] = outputs

    def rollback(self, count: int) -> None:
        """Removes the nodes after the first ``count``."""
        while len(self.nodes) > count:
            node, key = self.nodes.pop(), self._keys.pop()
            if key is not None:
                self._seen.pop(key, None)
            detach(node)

    def live_nodes(self, outputs: Iterable[ir.Value], dead: list[ir.Value] | None = None) -> list[ir.Node]:
        """The nodes that the outputs need, in order; the others let go of their inputs. Linear in the graph.

        Args:
            outputs: The needed values.
            dead: Receives the results of the other nodes.
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


class Scopes:
    """The graphs under construction, one within the other: nodes go into the innermost.

    Args:
        sizes: The builder's sizes: the records made within a subgraph are undone when it is complete.
        provenance: Records the origins of nodes.
    """

    def __init__(self, sizes: Sizes, provenance: Provenances) -> None:
        self.innermost = Scope(None)
        self._sizes = sizes
        self._provenance = provenance
        self._numbers = count()

    @contextmanager
    def nested(self, *, isolated: bool = False, scope: Scope | None = None) -> Iterator[Scope]:
        """A context whose nodes go into a scope of their own.

        Args:
            isolated: Nodes of the scopes around it are not shared.
            scope: The scope, instead of a new scope within the present scope.
        """
        outer = self.innermost
        self.innermost = Scope(outer, isolated=isolated) if scope is None else scope
        try:
            yield self.innermost
        finally:
            self.innermost = outer

    def live(self, outputs: Iterable[ir.Value]) -> list[ir.Node]:
        """The nodes emitted into the present scope that the outputs need, in order; the others let go of their inputs."""
        dead: list[ir.Value] = []
        nodes = self.innermost.live_nodes(outputs, dead)
        self._sizes.forget(dead)
        return nodes

    def identity(self, value: ir.Value) -> ir.Value:
        """A value of its own that equals ``value``; never simplified away, as ``g.op.Identity`` is."""
        result = ir.Value(type=value.type, shape=value.shape.copy() if value.shape is not None else None)
        node = ir.Node("", "Identity", [value], outputs=[result])
        self._provenance.record(node)
        self.innermost.add(node, None, (result,))
        return result

    def own_outputs(self, results: ir.Value | Sequence[ir.Value]) -> list[ir.Value]:
        """The outputs of a graph: each is made inside of the present scope, and none is an output twice."""
        outputs = [results] if isinstance(results, ir.Value) else list(results)
        own_values = {id(v) for node in self.innermost.nodes for v in node.outputs}
        for position, value in enumerate(outputs):
            if id(value) not in own_values or any(value is o for o in outputs[:position]):
                outputs[position] = self.identity(value)
        return outputs

    def subgraph(
        self,
        build: Callable[..., ir.Value | Sequence[ir.Value]],
        inputs: Sequence[tuple[torch.dtype | ir.DataType, Sequence[Any] | None]],
        name: str,
    ) -> ir.Graph:
        """A graph for an attribute (:meth:`GraphBuilder.subgraph`)."""
        formals = [
            ir.Value(
                name=f"{name}_in{next(self._numbers)}",
                type=ir.TensorType(to_onnx_dtype(dtype)),
                shape=ir.Shape(dims) if dims is not None else None,
            )
            for dtype, dims in inputs
        ]
        with self.nested(), self._sizes.local():
            outputs = self.own_outputs(build(*formals))
            nodes = self.live(outputs)
            # Named here, uniquely: ir.Graph would count from 0 in each, and a name is visible in the graphs within.
            for value in (v for node in nodes for v in node.outputs if v.name is None):
                value.name = f"{name}_value{next(self._numbers)}"
        return ir.Graph(formals, outputs, nodes=nodes, name=f"{name}_{next(self._numbers)}")


def detach(node: ir.Node) -> None:
    """Takes a node that won't be in the graph off its inputs' lists of uses."""
    for index, value in enumerate(node.inputs):
        if value is not None:
            node.replace_input_with(index, None)


def used_by(node: ir.Node) -> Iterator[ir.Value]:
    """The values a node reads, including the outer values that its subgraphs read."""
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
    graphs: list[ir.Graph] = []
    for attr in node.attributes.values():
        kind = attr.type
        if (kind is _GRAPH or kind is _GRAPHS) and not attr.is_ref():
            graphs += (attr.as_graph(),) if kind is _GRAPH else attr.as_graphs()
    return graphs


def nodes_of(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Every node of a graph, including the nodes of its subgraphs."""
    for node in graph:
        yield node
        if node.op_type in _WITH_SUBGRAPHS or node.domain:
            for inner in graphs_of(node):
                yield from nodes_of(inner)
