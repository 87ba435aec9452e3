"""Subgraphs: branches and bodies of control flow, and regions under another gradient or autocast mode."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from onnxplug.errors import ConversionError
from onnxplug.functionalize.effects import writes
from onnxplug.functionalize.inplace import make_functional

#: Higher-order operators that run their subgraph unchanged, under another mode or compiled once, each with the number of arguments
#: from the subgraph to its operands.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 1, "invoke_subgraph": 2}

Copies = dict[torch.fx.Node, torch.fx.Node]


def subgraph_at(node: torch.fx.Node, owner: torch.nn.Module | None) -> torch.fx.GraphModule | None:
    """The graph that a ``get_attr`` node names, ``None`` for anything else."""
    if node.op != "get_attr" or owner is None:
        return None
    module = owner
    for part in str(node.target).split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    return module if isinstance(module, torch.fx.GraphModule) else None


def subgraphs_of(graph: torch.fx.Graph, owner: torch.nn.Module | None) -> Iterator[torch.fx.GraphModule]:
    """Every subgraph of a graph, at any depth."""
    for node in graph.nodes:
        inner = subgraph_at(node, owner)
        if inner is not None:
            yield inner
            yield from subgraphs_of(inner.graph, inner)


def subgraphs_are_functional(graph: torch.fx.Graph, owner: torch.nn.Module | None) -> bool:
    """Whether every subgraph can be made functional by itself: none writes its inputs."""
    for inner in subgraphs_of(graph, owner):
        if writes(inner.graph):
            functional = make_functional(inner.graph)
            if functional is None or functional.mutated or functional.conditions:
                return False
    return True


def functional_subgraph(graph: torch.fx.Graph, call: str) -> torch.fx.Graph:
    """A subgraph, made functional by itself.

    Args:
        call: The call that runs it, for the message.

    Raises:
        ConversionError: It writes its inputs, or has no functional form.
    """
    if not writes(graph):
        return graph
    functional = make_functional(graph)
    if functional is None or functional.mutated or functional.conditions:
        raise ConversionError(
            f"the subgraph of {call} writes its inputs in place, or writes in a way that has no functional form",
            hint="Replace in-place writes there (x[...] = y, x.add_(y)) by torch.where, torch.cat or x + y.",
        )
    return functional.graph


def inline_regions(graph: torch.fx.Graph, targets: Iterable[Any]) -> tuple[torch.fx.Graph, Copies]:
    """The graph with every region inlined if one of them writes in place, and its nodes in the new graph.

    A region may write its inputs, which nodes outside of it would not see; once it is inlined they do.
    """
    owner = graph.owning_module
    regions = []
    if any(_name(target) in _REGIONS for target in targets):
        regions = [region_call[1] for node in graph.nodes if (region_call := _region(node, owner)) is not None]
    if not any(writes(g.graph) for r in regions for g in (r, *subgraphs_of(r.graph, r))):
        return graph, {node: node for node in graph.nodes}
    return inlined(graph)


def inlined(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, Copies]:
    """A copy of a graph with every region inlined, and the graph's nodes in it."""
    copy = torch.fx.Graph(owning_module=graph.owning_module)
    copies: Copies = {}
    _copy(graph, graph.owning_module, "", copy, copies)
    copy._codegen = graph._codegen
    return copy, copies


def _name(target: Any) -> str:
    return getattr(target, "__name__", "")


def _region(
    node: torch.fx.Node, owner: torch.nn.Module | None
) -> tuple[torch.fx.Node, torch.fx.GraphModule, tuple[Any, ...]] | None:
    """The node of a region's graph, the graph, and its operands; ``None`` for any other node."""
    if node.op != "call_function" or _name(node.target) not in _REGIONS:
        return None
    for position, argument in enumerate(node.args):
        inner = subgraph_at(argument, owner) if isinstance(argument, torch.fx.Node) else None
        if inner is not None and isinstance(argument, torch.fx.Node):
            return argument, inner, node.args[position + _REGIONS[_name(node.target)] :]
    return None


def _copy(
    graph: torch.fx.Graph, owner: torch.nn.Module | None, prefix: str, copy: torch.fx.Graph, copies: dict[Any, Any]
) -> None:
    """Copies nodes, the calls of regions replaced by their nodes; ``prefix`` leads to the graph's own module."""
    results: dict[torch.fx.Node, Any] = {}
    for node in graph.nodes:
        if prefix and node.op in ("placeholder", "output"):
            continue
        region_call = _region(node, owner)
        if region_call is not None:
            attribute, region, operands = region_call
            formals = [n for n in region.graph.nodes if n.op == "placeholder"]
            inner = dict(zip(formals, torch.fx.map_arg(operands, copies.__getitem__), strict=True))
            _copy(region.graph, region, f"{prefix}{attribute.target}.", copy, inner)
            returned: Any = region.graph.output_node().args[0]
            results[node] = torch.fx.map_arg(returned, inner.__getitem__)
        elif node.target is operator.getitem and node.args[0] in results:
            copies[node] = results[node.args[0]][node.args[1]]
        else:
            copied = copies[node] = copy.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copied.target = f"{prefix}{node.target}"
