"""Tensors that a model computes with and then replaces, where they are neither buffers nor inputs.

An example: ``self.state = self.state * 0.5 + x``. The exported model has the state of the export at every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from onnxplug.capture.locations import is_core_file, source_location


def replaced_texts(program: torch.export.ExportedProgram, replaced: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A warning for each replaced tensor on which a result of the program depends.

    A tensor that is only replaced, or whose old value decides its new one alone, is a by-product.

    Args:
        program: The captured program.
        replaced: The tensors before the call, by their names in the model.
    """
    if not replaced:
        return
    needed: set[torch.fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op == "output" or node in needed or getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            needed.update(node.all_input_nodes)
    inputs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    nodes: dict[Any, torch.fx.Node] = {}
    for node, spec in inputs:
        nodes[spec.target] = node
        if spec.target in program.constants:  # torch counts those in lists
            nodes[id(program.constants[spec.target])] = node
    for name, tensor in replaced.items():
        node = nodes.get(id(tensor)) or nodes.get(name)
        if node is None or node not in needed:
            continue
        place = next(filter(None, map(_place_of, needed & node.users.keys())), None)
        yield (
            f"the model's code{f' at {place}' if place else ''} computes with the tensor {name!r}, and replaces it: the exported "
            "model has the tensor of the export at every call, and leaves away the new one. Make it a buffer (register_buffer), "
            "whose new value is an output, or an input."
        )


def _place_of(node: torch.fx.Node) -> str | None:
    """The line of the user's code; ``None`` for a node that the capture itself repeats from a graph."""
    place = source_location(node)
    return None if place is None or is_core_file(place) else place
