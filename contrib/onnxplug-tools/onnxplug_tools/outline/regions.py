"""The nodes of the calls of modules in a graph, and the calls whose nodes can be taken out of the graph as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxplug.build.stored import META, Origin
from onnxplug_tools.outline.calls import ModuleCall, ModuleCalls
from onnxplug_tools.outline.canonical import outputs_of, read_by

Chain = tuple[ModuleCall, ...]
_OF_SIZES = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The nodes of a call of a module, in the order of the graph."""

    call: ModuleCall
    nodes: Sequence[ir.Node]


Item = Region | ir.Node


class Regions:
    """The nodes of a graph, and the calls of modules that each is part of."""

    def __init__(self, graph: ir.Graph, calls: ModuleCalls) -> None:
        self.nodes = list(graph)
        self.results = frozenset(graph.outputs)
        #: The calls that each node is part of, outermost first.
        self.chains: dict[ir.Node, Chain] = {node: calls.taken_from(node) for node in self.nodes}
        self._reads = {node: read_by(node) for node in self.nodes}
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self._reads.items():
            for value in values:
                self._readers.setdefault(value, []).append(node)

    def keep(self, wanted: Iterable[ModuleCall]) -> None:
        """Forgets every call but the wanted calls."""
        kept = frozenset(wanted)
        shortened: dict[Chain, Chain] = {}
        for node, chain in self.chains.items():
            if chain not in shortened:
                shortened[chain] = tuple(call for call in chain if call in kept)
            self.chains[node] = shortened[chain]

    def by_call(self) -> dict[ModuleCall, list[ir.Node]]:
        """The nodes of each call."""
        nodes_of: dict[ModuleCall, list[ir.Node]] = {}
        for node in self.nodes:
            for call in self.chains[node]:
                nodes_of.setdefault(call, []).append(node)
        return nodes_of

    def outputs_of(self, nodes: Sequence[ir.Node]) -> list[ir.Value]:
        """The results of some nodes that other nodes read, or that the graph returns."""
        return outputs_of(nodes, self._readers, self.results)

    # -- results that calls share --------------------------------------------------------------------------------------

    def give_back_shared(self) -> None:
        """Takes nodes out of a call whose results other calls use too: a size, a mask, a table of angles.

        Equal nodes are shared, so that the first of a model's blocks has nodes that the next blocks lack. Taken out,
        their results are inputs of all blocks. No node that depends on the module's own weights is taken out: a
        layer's result stays in the layer.
        """
        depth = 0
        while True:
            regions: dict[ModuleCall, list[ir.Node]] = {}
            for node, chain in self.chains.items():
                if len(chain) > depth:
                    regions.setdefault(chain[depth], []).append(node)
            if not regions:
                return
            for call, nodes in regions.items():
                for node in self._shared(call, nodes):
                    self.chains[node] = self.chains[node][:depth]
            depth += 1

    def _shared(self, call: ModuleCall, nodes: Sequence[ir.Node]) -> list[ir.Node]:
        """The nodes of a call that others need as well, and the nodes of the call that these need."""
        starts = {
            producer
            for value in self.outputs_of(nodes)
            if (producer := value.producer()) is not None and self._is_shared(call, value)
        }
        if not starts:
            return []
        inside = set(nodes)
        own: set[ir.Node] = set()  # nodes that depend on the module's weights, directly or not
        for node in nodes:
            for value in self._reads[node]:
                if value.producer() in own or _belongs_to(value, call):
                    own.add(node)
                    break
        shared: set[ir.Node] = set()
        pending = [node for node in starts if node not in own]
        while pending:
            node = pending.pop()
            if node not in shared:
                shared.add(node)
                before = (value.producer() for value in self._reads[node])
                pending += (n for n in before if n is not None and n in inside)
        return list(shared) if len(shared) < len(nodes) else []

    def _is_shared(self, call: ModuleCall, value: ir.Value) -> bool:
        """Whether a call's result is a size, or is read by another call of the same class."""
        if value.dtype in _OF_SIZES and value.shape is not None and len(value.shape) <= 1:
            return True
        for reader in self._readers.get(value, ()):
            chain = self.chains[reader]
            if call not in chain and any(other.class_name == call.class_name for other in chain):
                return True
        return False

    # -- one after the other -------------------------------------------------------------------------------------------

    def arranged(self, nodes: Sequence[ir.Node], depth: Mapping[ir.Node, int]) -> list[Item]:
        """Nodes and, in the place of the outermost calls that they are part of, regions; each after the items it reads.

        A call isn't taken out where nodes outside of it both read its results and compute its operands: the calls
        within it are tried then.

        Args:
            nodes: The nodes, in the order of the graph.
            depth: Node to the number of its calls that are around all of the nodes.
        """
        from networkx import DiGraph, strongly_connected_components

        level = dict(depth)
        while True:
            groups: dict[ir.Node | ModuleCall, list[ir.Node]] = {}
            for node in nodes:
                chain = self.chains[node]
                place = level.get(node, 0)
                groups.setdefault(chain[place] if place < len(chain) else node, []).append(node)
            of = {node: key for key, members in groups.items() for node in members}
            order: list[Item] = []
            entangled = False
            # Each group comes after the groups that it reads; otherwise the groups keep their order.
            for group in strongly_connected_components(DiGraph(self._needs(of, groups))):
                if len(group) > 1:
                    entangled = True
                    for key in group:
                        for node in groups[key] if isinstance(key, ModuleCall) else ():
                            level[node] = level.get(node, 0) + 1
                (key, *_) = group
                order.append(Region(key, groups[key]) if isinstance(key, ModuleCall) else key)
            if not entangled:
                return order

    def _needs(
        self, of: Mapping[ir.Node, ir.Node | ModuleCall], groups: Mapping[ir.Node | ModuleCall, Sequence[ir.Node]]
    ) -> dict[ir.Node | ModuleCall, list[ir.Node | ModuleCall]]:
        """The other nodes and regions that each node or region reads."""
        needs = {}
        for key, members in groups.items():
            producers = (value.producer() for node in members for value in self._reads[node])
            needed = dict.fromkeys(of[p] for p in producers if p is not None and p in of)
            needed.pop(key, None)
            needs[key] = list(needed)
        return needs


def _belongs_to(value: ir.Value, call: ModuleCall) -> bool:
    """Whether a value is a weight of the module that is called, and of no other."""
    origin: Origin | None = value.meta.get(META)
    return origin is not None and all(target.startswith(f"{call.path}.") for target in origin.targets)
