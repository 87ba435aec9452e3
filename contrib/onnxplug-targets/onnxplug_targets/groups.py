"""Groups of nodes that a provider computes at once, made as QNN's makes them: a loop does not wait for what its body reads."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping

import onnx_ir as ir

from onnxplug_targets.features import graphs_of


def is_circular(graph: ir.Graph, left: Collection[ir.Node]) -> bool:
    """Whether a group would be computed both before and after a node outside of it; ONNX Runtime then takes none of them.

    Args:
        graph: The graph.
        left: Its nodes that the provider does not compute.
    """
    nodes = {
        node: {*_producers(node), *_producers_of_subgraphs(node, graph)} for node in graph if node.op_type != "Constant"
    }
    for group in _groups(nodes, left):
        between: set[ir.Node] = set()
        for node, producers in nodes.items():
            if node in group:
                if not between.isdisjoint(producers):
                    return True
            elif not (group.isdisjoint(producers) and between.isdisjoint(producers)):
                between.add(node)
    return False


def _groups(nodes: Mapping[ir.Node, set[ir.Node]], left: Collection[ir.Node]) -> Iterator[set[ir.Node]]:
    """Nodes whose inputs are there, until none is left but those that wait for the group to be computed.

    Args:
        nodes: The nodes, with those whose values each and its subgraphs read.
    """
    waiting = Counter({node: sum(1 for _ in _producers(node)) for node in nodes})
    ready = deque(node for node in nodes if not waiting[node])
    later: deque[ir.Node] = deque()
    group: set[ir.Node] = set()
    while ready or later:
        if not ready:
            yield group
            ready, later, group = later, deque(), set()
            continue
        node = ready.popleft()
        if node in left and not group.isdisjoint(nodes[node]):
            later.append(node)
            continue
        if node not in left:
            group.add(node)
        for value in node.outputs:
            for use in value.uses():
                if use.node in waiting:
                    waiting[use.node] -= 1
                    if not waiting[use.node]:
                        ready.append(use.node)
    yield group


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes that give its inputs, one for each."""
    for value in node.inputs:
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type != "Constant":
            yield producer


def _producers_of_subgraphs(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes around it whose values its subgraphs read."""
    for inner in graphs_of(node):
        for value in (*inner.outputs, *(value for part in inner.all_nodes() for value in part.inputs)):
            producer = value.producer() if value is not None else None
            if producer is not None and producer.graph is graph:
                yield producer
