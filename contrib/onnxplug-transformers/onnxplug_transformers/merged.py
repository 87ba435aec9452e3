"""A decoder's step and the projections of the encoder's states as one model; ``use_cache_branch`` chooses the keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass

BRANCH, STATES = "use_cache_branch", "encoder_hidden_states"
_CROSS = ".encoder."
_LENGTH = "encoder_sequence_length_out"


def merge(decoder: ir.Model, projections: ir.Model) -> None:
    """Puts the projections into a decoder, in place.

    The decoder has inputs ``past_key_values.N.encoder.key`` and ``.value``, and the projections have outputs of these names, made
    from ``encoder_hidden_states``. Afterwards ``use_cache_branch`` chooses: where it is true, the inputs are read; where it is
    false, as in the first step, the projections are. The chosen keys and values are among the
    results, as ``present.N.encoder.key`` and ``.value``.
    """
    graph = decoder.graph
    branch = ir.Value(name=BRANCH, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.BOOL))
    past = {str(value.name): value for value in graph.inputs if _CROSS in str(value.name)}
    InlinePass()(projections)
    made = {str(value.name): value for value in projections.graph.outputs}
    nodes = move_nodes(projections, decoder, "projections")
    kept = ir.Graph([], [], nodes=[], name="kept")
    for name, value in past.items():
        node = ir.node("Identity", [value])
        node.outputs[0].name = f"kept.{name}"
        kept.append(node)
        kept.outputs.append(node.outputs[0])
    computed = ir.Graph([], [made[name] for name in past], nodes=nodes, name="computed")
    chosen = [
        ir.Value(name=name.replace("past_key_values", "present"), type=value.type, shape=made[name].shape)
        for name, value in past.items()
    ]
    for value, new in zip(past.values(), chosen, strict=True):
        value.replace_all_uses_with(new)
    for node in kept:  # the inputs themselves
        name = str(node.outputs[0].name).removeprefix("kept.")
        node.replace_input_with(0, past[name])
    choice = ir.Node(
        "",
        "If",
        [branch],
        [ir.AttrGraph("then_branch", kept), ir.AttrGraph("else_branch", computed)],
        outputs=chosen,
        name="encoder_key_values",
    )
    graph.insert_before(graph[0], choice)
    for value in past.values():
        assert value.shape is not None
        value.shape = ir.Shape([value.shape[0], value.shape[1], _LENGTH, value.shape[3]])
    states = projections.graph.inputs.pop()
    _order(graph, past, states, branch)
    graph.outputs.extend(chosen)


def merged_samples(step: Mapping[str, Any], first: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs of the merged model: of a first step, and of a later step."""
    states = first[STATES]
    later = {**step, STATES: states, BRANCH: torch.tensor([True])}
    empty = {name: value[:, :, :0] for name, value in step.items() if name.startswith("past_key_values.")}
    return [{**later, **empty, BRANCH: torch.tensor([False])}, later]


def move_nodes(model: ir.Model, other: ir.Model, prefix: str) -> list[ir.Node]:
    """Takes the nodes out of a model; its weights and functions go to the other model. The names get a prefix."""
    for domain, version in model.opset_imports.items():
        assert other.opset_imports.setdefault(domain, version) == version  # all are exported with the same options
    other.functions.update(model.functions)
    model.graph.outputs.clear()
    for name, value in list(model.graph.initializers.items()):
        model.graph.initializers.pop(name)
        value.name = f"{prefix}.{name}"
        other.graph.register_initializer(value)
    for node in model.graph.all_nodes():
        node.name = f"{prefix}.{node.name}"
        for value in node.outputs:
            value.name = f"{prefix}.{value.name}"
    nodes = list(model.graph)
    model.graph.remove(nodes)
    return nodes


def _order(graph: ir.Graph, past: Mapping[str, ir.Value], states: ir.Value, branch: ir.Value) -> None:
    """Orders the inputs: each layer's own keys and values before the encoder's."""
    own = {str(value.name): value for value in graph.inputs if str(value.name).startswith("past_key_values.")}
    rest = [value for value in graph.inputs if value.name not in own]
    layers = sorted({int(name.split(".")[1]) for name in own})
    ordered = [
        own[f"past_key_values.{layer}.{half}.{kind}"]
        for layer in layers
        for half in ("decoder", "encoder")
        for kind in ("key", "value")
    ]
    assert len(ordered) == len(own) and past.keys() <= own.keys()
    graph.inputs.clear()
    graph.inputs.extend([*rest, states, branch, *ordered])
