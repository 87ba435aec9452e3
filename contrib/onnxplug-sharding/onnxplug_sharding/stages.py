"""Stages of a pipeline: each node has the stage of its module, or the latest stage of the results that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnxplug import UsageError
from onnxplug.build.provenance import NAMESPACE


def assign_stages(model: ir.Model, configuration: ir.ModelConfiguration, stages: Mapping[str, int]) -> None:
    """Writes the stage of each node of the graph.

    Args:
        model: The model; it is changed.
        configuration: The configuration of the stages.
        stages: Names of modules to their stages; the longest name with which a node's module begins counts.

    Raises:
        UsageError: A stage is no number from 0 on, a name is no module's, or a node reads the result of a later stage.
    """
    for name, stage in stages.items():
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise UsageError(f"stages= takes numbers from 0 on, got {stage!r} for {name!r}")
    of: dict[ir.Node, int] = {}
    used: set[str] = set()
    for node in model.graph:
        before = max((of.get(producer, 0) for value in _read(node) if (producer := value.producer())), default=0)
        words = _module(node).split(".")
        found = next((n for n in range(len(words), 0, -1) if ".".join(words[:n]) in stages), None)
        name = ".".join(words[:found])
        of[node] = before if found is None else stages[name]
        used |= {name} if found is not None else set()
        if of[node] < before:
            raise UsageError(f"{node.name!r} is in stage {of[node]}, and reads a result of stage {before}")
    if missing := sorted(stages.keys() - used):
        raise UsageError(
            f"no node of the program is in a module {missing[0]!r}",
            hint="Modules are known of nodes in programs with metadata, which metadata='none' leaves out.",
        )
    for node, stage in of.items():
        node.set_pipeline_stage(configuration, stage)


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads, and all values that the nodes of its subgraphs read."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        for graph in (attribute.as_graph(),) if attribute.type == ir.AttributeType.GRAPH else ():
            for inner in graph:
                yield from _read(inner)


def _module(node: ir.Node) -> str:
    """The name of the innermost module that a node belongs to; empty where it is unknown."""
    parts = node.metadata_props.get(NAMESPACE, "").split("/")[:-1]
    return parts[-1].partition(": ")[0] if parts else ""
