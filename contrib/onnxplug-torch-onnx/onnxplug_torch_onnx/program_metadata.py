"""What a model says of its inputs, weights and outputs, and of the captured program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.capture.signature import FunctionalGraph, InputKind, InputSlot, OutputKind
from onnxplug.interpret.provenance import Describer

#: The keys that ``torch.onnx.export`` writes.
INPUT_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
OUTPUT_KIND = "pkg.torch.export.graph_signature.OutputSpec.kind"
ORIGINAL_NAME = "pkg.torch.onnx.original_node_name"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
RANGES = "pkg.torch.export.ExportedProgram.range_constraints"
#: One that it doesn't.
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


def write(
    program: torch.export.ExportedProgram,
    describer: Describer,
    builder: GraphBuilder,
    graph: ir.Graph,
    bound: Mapping[torch.fx.Node, Any],
    functional: FunctionalGraph,
) -> dict[ir.Value, dict[str, str]]:
    """Writes the metadata of a finished graph, and returns those of its values; the parameters are those of the functions below."""
    graph.metadata_props.update(graph_metadata(program, describer))
    return value_metadata(builder, graph, bound, functional)


def value_metadata(
    builder: GraphBuilder, graph: ir.Graph, bound: Mapping[torch.fx.Node, Any], functional: FunctionalGraph
) -> dict[ir.Value, dict[str, str]]:
    """The metadata of a finished graph's inputs, initializers and outputs.

    Args:
        builder: The builder of the graph.
        graph: The graph.
        bound: What the placeholders became.
        functional: The FX graph with its signature.
    """
    said: dict[ir.Value, dict[str, str]] = {}
    slot_of = dict(_slots(bound, graph, functional))
    for value in (*graph.inputs, *graph.initializers.values()):
        slot = slot_of.get(builder.weights.root_of(value))
        if slot is not None:
            kind = slot.kind
            # As torch has it: of a buffer alone it is known.
            persistent = slot.persistent if kind is InputKind.BUFFER else None
            said[value] = {
                # A model has many parameters, and enumerations are hashed slowly.
                INPUT_KIND: "PARAMETER" if kind is InputKind.PARAMETER else _INPUT_KINDS[kind],
                PERSISTENT: str(persistent),
                ORIGINAL_NAME: slot.node.name,
            }
    outputs = {slot.name: slot for slot in functional.outputs if slot.value is not None}
    for value in graph.outputs:
        found = outputs.get(str(value.name))
        if found is not None:
            said[value] = {OUTPUT_KIND: _OUTPUT_KINDS[found.kind]}
            if isinstance(found.value, torch.fx.Node):
                said[value][ORIGINAL_NAME] = found.value.name
    return said


def _slots(
    bound: Mapping[torch.fx.Node, Any], graph: ir.Graph, functional: FunctionalGraph
) -> Iterator[tuple[ir.Value, InputSlot]]:
    """The values that stand for inputs and state, each with its slot; of a tied weight that of its first name."""
    inputs = {value.name: value for value in graph.inputs}
    for slot in reversed(functional.inputs):
        if slot.kind is not InputKind.PARAMETER and slot.kind not in _INPUT_KINDS:
            continue
        value = inputs.get(slot.name) if slot.kind is InputKind.USER else bound.get(slot.node)
        if isinstance(value, ir.Value):
            yield value, slot


def graph_metadata(program: torch.export.ExportedProgram, describer: Describer) -> dict[str, str]:
    """The metadata of the graph.

    Args:
        program: What torch.export made.
        describer: Writes FX nodes.
    """
    return {
        SIGNATURE: str(program.graph_signature),
        RANGES: str(program.range_constraints),
        PROGRAM: describer.listing(program.graph),
    }
