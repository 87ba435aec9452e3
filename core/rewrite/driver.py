"""Runs rewrites to a fixed point with a worklist: each node is looked at once, and again only when its inputs changed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxplug.build.scope import detach
from onnxplug.errors import ConversionError

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder
    from onnxplug.rewrite.rewrite import Rewrite

#: A rewrite that fires more often than this for each node of the graph isn't going to stop.
MAX_FIRINGS_PER_NODE = 8


def run_rewrites(g: GraphBuilder, graph: ir.Graph, rewrites: Iterable[Rewrite]) -> Counter[str]:
    """Applies rewrites to a graph until none applies, in time linear in the graph and the number of replacements.

    Returns:
        How often each rewrite fired.

    Raises:
        ConversionError: A rewrite raised, changed a dtype or rank, or does not terminate; it is named.
    """
    table: dict[str, list[Rewrite]] = {}
    for rewrite in rewrites:
        if rewrite.applies_to(g.opsets, g.runtime, g.exact):
            table.setdefault(rewrite.op, []).append(rewrite)
    fired: Counter[str] = Counter()
    if not table:
        return fired
    work: deque[ir.Node] = deque(node for node in graph if _key(node) in table)
    limit = MAX_FIRINGS_PER_NODE * (graph.num_nodes() + 16)
    while work:
        node = work.popleft()
        if node.graph is not graph:
            continue
        for rewrite in table[_key(node)]:
            replacement = _try(g, graph, node, rewrite)
            if replacement is None:
                continue
            fired[rewrite.name] += 1
            if fired[rewrite.name] > limit:
                raise ConversionError(
                    f"the rewrite {rewrite.name!r} does not terminate: it fired {fired[rewrite.name]} times",
                    hint="It matches its own output. Leave it out, or make its pattern narrower.",
                )
            work.extend(n for n in replacement if n.graph is graph and _key(n) in table)
            break
    return fired


def _key(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _try(g: GraphBuilder, graph: ir.Graph, node: ir.Node, rewrite: Rewrite) -> list[ir.Node] | None:
    """Applies one rewrite at one node; returns the nodes to look at again."""
    with g.nested(isolated=True) as scope, g.converting(None, dict(node.metadata_props)):
        try:
            result = rewrite.apply(g, node)
            if result is None:
                scope.rollback(0)
                return None
            values = [result] if isinstance(result, ir.Value) else list(result)
            _check(node, values, rewrite)
            made = g.live(values)
        except ConversionError:
            raise
        except Exception as error:
            raise ConversionError(
                f"the rewrite {rewrite.name!r} raised {type(error).__name__} at {_key(node)}: {error}"
            ) from error
    graph.insert_before(node, made)
    return [*made, *_replace(graph, node, values)]


def _check(node: ir.Node, values: Sequence[Any], rewrite: Rewrite) -> None:
    if len(values) != len(node.outputs):
        raise ConversionError(
            f"the rewrite {rewrite.name!r} returned {len(values)} values for {len(node.outputs)} of {_key(node)}"
        )
    for old, new in zip(node.outputs, values, strict=True):
        if new.dtype is None:
            new.type = old.type
        if new.dtype != old.dtype:
            raise ConversionError(f"the rewrite {rewrite.name!r} changed {old.dtype} to {new.dtype} at {_key(node)}")
        if new.shape is not None and old.shape is not None and len(new.shape) != len(old.shape):
            raise ConversionError(f"the rewrite {rewrite.name!r} changed the rank at {_key(node)}")


def _replace(graph: ir.Graph, node: ir.Node, values: Sequence[ir.Value]) -> list[ir.Node]:
    """Puts values in the place of a node's outputs and removes what nothing needs any more; returns the consumers."""
    consumers: list[ir.Node] = []
    for old, new in zip(node.outputs, values, strict=True):
        if new.shape is None or old.shape is not None:
            new.shape = old.shape
        consumers.extend(old.consumers())
        # The name goes along: users find values by it.
        if new.producer() is not None and old.name and not new.is_graph_output():
            old_name, old.name = old.name, None
            new.name = old_name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    pending = [node]
    while pending:
        dead = pending.pop()
        if dead.graph is not graph or any(v.uses() or v.is_graph_output() for v in dead.outputs):
            continue
        before = [v.producer() for v in dead.inputs if v is not None]
        detach(dead)
        graph.remove(dead)
        pending.extend(n for n in before if n is not None)
    return consumers
