"""Groups of nodes that a provider computes at once.

QNN's groups are made as if a loop did not wait for the values that its body reads. OpenVINO's groups are connected
nodes between the nodes that it leaves, in ONNX Runtime's order; it leaves some of the groups too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx_ir as ir

from onnxplug_targets.features import graphs_of, is_constant


def is_circular(graph: ir.Graph, left: Collection[ir.Node]) -> bool:
    """Whether a group would be computed both before and after a node outside of it; ONNX Runtime then takes no group.

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
    """The groups: each takes the nodes whose inputs are computed, until all other nodes wait for the group.

    Args:
        nodes: Each node, with the producers of the values that it and its subgraphs read.
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


def groups_left(graph: ir.Graph, left: Collection[ir.Node]) -> set[ir.Node]:
    """The nodes of the groups that OpenVINO leaves.

    These are groups of one node, except the last group and a node that reads weights alone, and groups with a Conv or
    an Identity that a node outside reads.

    Args:
        graph: The graph.
        left: Its nodes that the provider does not compute.
    """
    found: set[ir.Node] = set()
    nodes, readers = _reads(graph)
    groups = list(_runs(nodes, readers, left)) if left else []
    for group in groups:
        read_outside = any(node.op_type in ("Conv", "Identity") and not readers[node] <= group for node in group)
        if read_outside or (len(group) == 1 and group is not groups[-1] and not all(map(_is_constant, group))):
            found |= group
    return found


def is_together(graph: ir.Graph, left: Collection[ir.Node], *members: ir.Node) -> bool:
    """Whether nodes are in the same group of OpenVINO.

    Args:
        graph: The graph.
        left: Its nodes that the provider does not compute.
        members: The nodes.
    """
    return not left or any(group.issuperset(members) for group in _runs(*_reads(graph), left))


def _reads(graph: ir.Graph) -> tuple[dict[ir.Node, set[ir.Node]], dict[ir.Node, set[ir.Node]]]:
    """For each node, the producers of the values that it and its subgraphs read, and the readers of its own values."""
    nodes = {
        node: {*_producers(node), *_producers_of_subgraphs(node, graph)} for node in graph if node.op_type != "Constant"
    }
    readers: dict[ir.Node, set[ir.Node]] = {node: set() for node in nodes}
    for node, producers in nodes.items():
        for producer in producers:
            readers[producer].add(node)
    return nodes, readers


def _is_constant(node: ir.Node) -> bool:
    """Whether a node reads weights alone."""
    return all(value is None or value.is_initializer() or is_constant(value) for value in node.inputs)


def _runs(
    nodes: Mapping[ir.Node, set[ir.Node]], readers: Mapping[ir.Node, set[ir.Node]], left: Collection[ir.Node]
) -> Iterator[set[ir.Node]]:
    """The connected nodes of each run between nodes that are left."""
    runs: list[dict[ir.Node, None]] = [{}]
    for node in _in_order(nodes, readers):
        if node in left:
            runs.append({})
        else:
            runs[-1][node] = None
    for run in runs:
        while run:
            group: set[ir.Node] = set()
            pending = [next(iter(run))]
            while pending:
                node = pending.pop()
                if node in run:
                    del run[node]
                    group.add(node)
                    pending += nodes[node] | readers[node]
            yield group


def _in_order(nodes: Mapping[ir.Node, set[ir.Node]], readers: Mapping[ir.Node, set[ir.Node]]) -> Iterator[ir.Node]:
    """ONNX Runtime's order: depth first, from the last node that nothing reads, and from a node's last producer."""
    numbers = {node: number for number, node in enumerate(nodes)}
    pending = [(node, False) for node in nodes if not readers[node]]
    seen: set[ir.Node] = set()
    while pending:
        node, is_done = pending.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            pending += [
                (node, True),
                *((producer, False) for producer in sorted(nodes[node] - seen, key=numbers.__getitem__)),
            ]


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    """The producers of a node's inputs, one for each input; constants are left out."""
    yield from _computing(node.inputs)


def _producers_of_subgraphs(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of ``graph`` whose values the subgraphs of a node read; constants are left out."""
    for inner in graphs_of(node):
        for producer in _computing((*inner.outputs, *(value for part in inner.all_nodes() for value in part.inputs))):
            if producer.graph is graph:
                yield producer


def _computing(values: Iterable[ir.Value | None]) -> Iterator[ir.Node]:
    """The producers of values, one for each value; ONNX Runtime makes initializers of constants."""
    for value in values:
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type != "Constant":
            yield producer
