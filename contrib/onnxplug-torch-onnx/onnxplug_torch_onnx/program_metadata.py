"""The metadata of a model's inputs, weights and outputs, and of the captured program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.capture.signature import FunctionalGraph, InputKind, InputSlot, OutputKind
from onnxplug.interpret.provenance import ADDRESS

#: The keys that ``torch.onnx.export`` writes.
INPUT_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
OUTPUT_KIND = "pkg.torch.export.graph_signature.OutputSpec.kind"
ORIGINAL_NAME = "pkg.torch.onnx.original_node_name"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
RANGES = "pkg.torch.export.ExportedProgram.range_constraints"
#: A key that it does not write.
PROGRAM = "pkg.onnxplug.exported_program"

#: torch's names of the kinds.
_INPUT_KINDS = {
    InputKind.PARAMETER: "PARAMETER",
    InputKind.BUFFER: "BUFFER",
    InputKind.CONSTANT: "CONSTANT_TENSOR",
    InputKind.USER: "USER_INPUT",
}
_OUTPUT_KINDS = {
    OutputKind.USER: "USER_OUTPUT",
    OutputKind.BUFFER_MUTATION: "BUFFER_MUTATION",
    OutputKind.INPUT_MUTATION: "USER_INPUT_MUTATION",
}


class FullMetadata:
    """Full metadata beside the origins of nodes: FX nodes as text, the program, its inputs, weights and outputs.

    Args:
        functional: The FX graph that is translated, whose nodes have the names of the captured nodes.
    """

    def __init__(self, program: torch.export.ExportedProgram, functional: FunctionalGraph) -> None:
        self._program = program
        self._functional = functional
        self._captured = {fx.name: fx for fx in program.graph.nodes}
        self._lines: dict[torch.fx.Node, str] = {}
        self._callees: dict[int, tuple[Any, str]] = {}

    def line(self, fx: torch.fx.Node) -> str:
        """An FX node as a line of text, as captured."""
        if fx.graph is self._functional.graph:
            captured = self._captured.get(fx.name)
            if captured is not None and captured.target is fx.target:
                fx = captured
        text = self._lines.get(fx)
        if text is None:
            # As format_node writes it, which takes far longer.
            if fx.op == "placeholder":
                return f"%{fx.name} : [num_users={len(fx.users)}] = placeholder[target={fx.target}]"
            if fx.op == "call_function" and fx.type is None:
                args, kwargs = fx.args, fx.kwargs
                text = (
                    f"%{fx.name} : [num_users={len(fx.users)}] = call_function[target={self._callee(fx)}]"
                    f"(args = ({_items(args)}{',' if len(args) == 1 else ''}), "
                    f"kwargs = {_argument(kwargs) if kwargs else '{}'})"
                )
            else:
                text = str(fx.format_node())
            text = ADDRESS.sub("", text) if " at 0x" in text else text
            self._lines[fx] = text
        return text

    def _callee(self, fx: torch.fx.Node) -> str:
        """A node's target as ``format_node`` writes it."""
        cached = self._callees.get(id(fx.target))
        if cached is None:  # each keeps its target alive, so that no id is used again
            text = str(fx.format_node()).partition("[target=")[2].partition("](args = ")[0]
            cached = self._callees[id(fx.target)] = fx.target, text
        return cached[1]

    def listing(self) -> str:
        """The captured graph, a node a line."""
        return "\n    ".join(["graph():", *[self.line(fx) for fx in self._program.graph.nodes if fx.op != "output"]])

    def write(
        self, builder: GraphBuilder, graph: ir.Graph, bound: Mapping[torch.fx.Node, Any]
    ) -> dict[ir.Value, dict[str, str]]:
        """Writes the metadata of a finished graph, and returns the metadata of its values."""
        graph.metadata_props.update(
            {
                SIGNATURE: str(self._program.graph_signature),
                RANGES: str(self._program.range_constraints),
                PROGRAM: self.listing(),
            }
        )
        return value_metadata(builder, graph, bound, self._functional)


def _argument(argument: Any) -> str:
    """An argument of an FX node, as ``format_node`` writes it."""
    kind = type(argument)
    if kind is torch.fx.Node:
        return f"%{argument.name}"
    if kind in _NUMBERS:
        return str(argument)
    if isinstance(argument, list):
        return f"[{_items(argument)}]"
    if isinstance(argument, tuple):
        return f"({_items(argument)}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, dict):
        return f"{{{', '.join([f'{key}: {_argument(item)}' for key, item in argument.items()])}}}"
    own = getattr(argument, "_custom_fx_repr_fn", None)
    return str(argument if own is None else own())


def _items(items: Sequence[Any]) -> str:
    """Arguments, joined by commas. Models have thousands of them: the two most common kinds need no call each."""
    texts = []
    for item in items:
        kind = type(item)
        if kind is torch.fx.Node:
            texts.append(f"%{item.name}")
        else:
            texts.append(str(item) if kind in _NUMBERS else _argument(item))
    return ", ".join(texts)


_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype})


def value_metadata(
    builder: GraphBuilder, graph: ir.Graph, bound: Mapping[torch.fx.Node, Any], functional: FunctionalGraph
) -> dict[ir.Value, dict[str, str]]:
    """The metadata of a finished graph's inputs, initializers and outputs.

    Args:
        functional: The FX graph with its signature.
    """
    metadata: dict[ir.Value, dict[str, str]] = {}
    slot_of = dict(_slots(bound, graph, functional))
    for value in (*graph.inputs, *graph.initializers.values()):
        slot = slot_of.get(builder.weights.root_of(value))
        if slot is not None:
            kind = slot.kind
            # As in torch: persistence is known of buffers alone.
            persistent = slot.persistent if kind is InputKind.BUFFER else None
            metadata[value] = {
                # A model has many parameters, and enumerations are hashed slowly.
                INPUT_KIND: "PARAMETER" if kind is InputKind.PARAMETER else _INPUT_KINDS[kind],
                PERSISTENT: str(persistent),
                ORIGINAL_NAME: slot.node.name,
            }
    outputs = {slot.name: slot for slot in functional.outputs if slot.value is not None}
    for value in graph.outputs:
        slot_ = outputs.get(str(value.name))
        if slot_ is not None:
            metadata[value] = {OUTPUT_KIND: _OUTPUT_KINDS[slot_.kind]}
            if isinstance(slot_.value, torch.fx.Node):
                metadata[value][ORIGINAL_NAME] = slot_.value.name
    return metadata


def _slots(
    bound: Mapping[torch.fx.Node, Any], graph: ir.Graph, functional: FunctionalGraph
) -> Iterator[tuple[ir.Value, InputSlot]]:
    """The values that stand for inputs and state, each with its slot; a tied weight has the slot of its first name."""
    inputs = {value.name: value for value in graph.inputs}
    for slot in reversed(functional.inputs):
        if slot.kind is not InputKind.PARAMETER and slot.kind not in _INPUT_KINDS:
            continue
        value = inputs.get(slot.name) if slot.kind is InputKind.USER else bound.get(slot.node)
        if isinstance(value, ir.Value):
            yield value, slot
