"""Parts of a captured graph that stand by themselves: values that they read from the rest become recorded inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onnxplug.capture.signature import FunctionalGraph, InputKind, InputSlot, OutputKind, OutputSlot
from onnxplug.verification.eager import placeholder_values, run_graph

_BOUNDARY = (torch.Tensor, int, float, bool)


@dataclass(frozen=True)
class Piece:
    """A part of a graph with its inputs.

    Attributes:
        expected: PyTorch's result for each output.
    """

    functional: FunctionalGraph
    leaves: list[Any]
    expected: list[Any]

    @property
    def operators(self) -> list[torch.fx.Node]:
        """Its operators."""
        return [node for node in self.functional.graph.nodes if node.op == "call_function" and not is_item(node)]


def is_item(node: torch.fx.Node) -> bool:
    """Whether a node takes one of the results of an operator that has several."""
    return getattr(node.target, "__name__", "") == "getitem"


class Recording:
    """A captured graph with the value of every node in one run by PyTorch."""

    def __init__(self, functional: FunctionalGraph, leaves: Sequence[Any]) -> None:
        self.functional = functional
        self._slots = {slot.node: slot for slot in functional.inputs}
        self._values: dict[torch.fx.Node, Any] = placeholder_values(functional, leaves)
        inputs = dict(self._values)

        def keep(node: torch.fx.Node, _: Any, result: Any) -> Any:
            self._values[node] = result
            return result

        run_graph(functional, inputs, keep)
        #: The operators that PyTorch ran, in order.
        self.operators = [
            n for n in functional.graph.nodes if n.op == "call_function" and n in self._values and not is_item(n)
        ]

    def piece(self, kept: Collection[torch.fx.Node], outputs: Collection[str] | None = None) -> Piece | None:
        """A part of the graph.

        Args:
            outputs: Names of the nodes that are its outputs; ``None``: nodes whose results the rest of the graph reads.

        Returns:
            The part; ``None`` where it can't stand by itself.
        """
        inside = self._with_items(kept)
        read = [n for node in self.functional.graph.nodes if node in inside for n in node.all_input_nodes]
        outer = {node for node in read if node not in inside}
        results = self._results(inside) if outputs is None else [n for n in inside if n.name in outputs]
        if not results or not all(self._can_be_input(node) for node in outer):
            return None
        graph = torch.fx.Graph(owning_module=self.functional.graph.owning_module)
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        inputs, leaves = self._inputs(graph, [n for n in self.functional.graph.nodes if n in outer], copies)
        for node in self.functional.graph.nodes:
            if node in inside or (node in outer and node.op == "get_attr"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in results))
        slots = [OutputSlot(copies[node], OutputKind.USER, f"output_{i}") for i, node in enumerate(results)]
        return Piece(FunctionalGraph(graph, inputs, slots), leaves, [self._values[node] for node in results])

    def _with_items(self, kept: Collection[torch.fx.Node]) -> dict[torch.fx.Node, None]:
        """Operators and the nodes that take their results apart, in the order of the graph."""
        inside: dict[torch.fx.Node, None] = {}
        wanted = set(kept)
        for node in self.functional.graph.nodes:
            if node in wanted or (is_item(node) and node.args[0] in inside and node in self._values):
                inside[node] = None
        return inside

    def _results(self, inside: Mapping[torch.fx.Node, None]) -> list[torch.fx.Node]:
        """The tensors that the rest of the graph reads, that the whole graph returns, or that no node reads."""
        returned = {slot.value for slot in self.functional.outputs if isinstance(slot.value, torch.fx.Node)}
        return [
            node
            for node in inside
            if isinstance(self._values[node], torch.Tensor)
            and (node in returned or not node.users or any(user not in inside for user in node.users))
        ]

    def _can_be_input(self, node: torch.fx.Node) -> bool:
        return node.op in ("placeholder", "get_attr") or isinstance(self._values.get(node), _BOUNDARY)

    def _inputs(
        self, graph: torch.fx.Graph, outer: Sequence[torch.fx.Node], copies: dict[torch.fx.Node, torch.fx.Node]
    ) -> tuple[list[InputSlot], list[Any]]:
        slots: list[InputSlot] = []
        leaves: list[Any] = []
        for node in outer:
            if node.op == "get_attr":
                continue
            new = copies[node] = graph.placeholder(node.name)
            new.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
            slot = self._slots.get(node)
            value = self._values[node]
            if slot is not None and slot.kind is not InputKind.USER:
                slots.append(replace(slot, node=new, position=None))
                continue
            if not isinstance(new.meta.get("val"), torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                slots.append(InputSlot(new, InputKind.STATIC, node.name, value=value))
                continue
            slots.append(InputSlot(new, InputKind.USER, node.name, position=len(leaves)))
            leaves.append(value)
        return slots, leaves
