"""Runs rewrites to a fixed point with a worklist: each node is tried once, and again only when its inputs changed.

An example, ``(x + x) * 3`` with two rewrites, of ``Add(x, x)`` to ``Mul(x, 2)`` and of ``Mul(Mul(x, a), b)`` to ``Mul(x, a*b)``::

    worklist           its first node
    add, mul           Add(x, x)         replaced by double = Mul(x, 2), which goes to the end of the worklist
    mul, double        Mul(double, 3)    replaced by sixfold = Mul(x, 6); no node reads double any more: it is removed
    double, sixfold    Mul(x, 2)         not in the graph: skipped
    sixfold            Mul(x, 6)         no rewrite applies, and the worklist is empty
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxplug.build.matching import is_op
from onnxplug.build.provenance import NOWHERE, Rewritten
from onnxplug.build.scope import Scope, detach, graphs_of, nodes_of
from onnxplug.errors import ConversionError
from onnxplug.plugin_api import PROJECT_NAME

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder
    from onnxplug.rewrite.rewrite import Rewrite

#: A rewrite that fires more often than this for each node of the graph isn't going to stop.
MAX_FIRINGS_PER_NODE = 8

Replaced = Mapping[ir.Value, ir.Value]


def run_rewrites(
    g: GraphBuilder, graph: ir.Graph, rewrites: Iterable[Rewrite], sources: Mapping[str, str] | None = None
) -> Counter[str]:
    """Applies rewrites to a graph, and to the branches and bodies in it, until none applies.

    Takes time linear in the graph and the number of replacements. Equal pure nodes that rewrites emit are shared within a
    graph.

    Args:
        g: The builder of the graph.
        graph: The graph.
        rewrites: The rewrites.
        sources: Name of a rewrite to its distribution.

    Returns:
        How often each rewrite fired.

    Raises:
        ConversionError: A rewrite raised, changed a dtype or rank, made a cycle, or does not terminate; the message names it
            and its distribution.
    """
    table: dict[str, list[Rewrite]] = {}
    for rewrite in rewrites:
        if rewrite.applies_to(g.opsets, g.runtime, g.exact):
            table.setdefault(rewrite.op, []).append(rewrite)
    if not table:
        return Counter()
    run = _Run(g, graph, table)
    try:
        return run.run()
    except ConversionError as error:
        source = (sources or {}).get(run.at.name if run.at is not None else "", PROJECT_NAME)
        if source == PROJECT_NAME:
            raise
        raise ConversionError(
            f"{error.message} (the rewrite is of {source})",
            hint=error.hint or "Without its plugin: plugins=[…], or --no-plugin NAME.",
        ) from error.__cause__


class _Shared:
    """The nodes that rewrites emitted into one graph, by their inputs and attributes."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.seen: dict[Any, tuple[ir.Value, ...]] = {}
        # The nodes stay alive here, so that no id in a key is used again.
        self._nodes: list[ir.Node] = []

    def lookup(self, key: Any) -> tuple[ir.Value, ...] | None:
        """The outputs of an equal node that is still in the graph."""
        outputs = self.seen.get(key)
        node = outputs[0].producer() if outputs else None
        return outputs if node is not None and node.graph is self.graph else None

    def keep(self, firing: _Firing) -> None:
        """Adds the nodes that a firing emitted."""
        self._nodes.extend(firing.nodes)
        self.seen.update(firing.own_keys())


class _Firing(Scope):
    """The scope of a firing: the nodes that a rewrite emits at a node."""

    def __init__(self, shared: _Shared) -> None:
        super().__init__(None)
        self._shared = shared

    def lookup(self, key: Any) -> tuple[ir.Value, ...] | None:
        """The outputs of an equal node, of this or an earlier firing."""
        outputs = super().lookup(key)
        return self._shared.lookup(key) if outputs is None else outputs

    def own_keys(self) -> Mapping[Any, tuple[ir.Value, ...]]:
        """The nodes that may be shared, by their keys."""
        return self._seen


class _Run:
    """One run over a graph."""

    def __init__(self, g: GraphBuilder, graph: ir.Graph, table: Mapping[str, Sequence[Rewrite]]) -> None:
        self.g = g
        self.graph = graph
        self.table = table
        self.fired: Counter[str] = Counter()
        #: The rewrite that is being tried.
        self.at: Rewrite | None = None
        self._shared: dict[int, _Shared] = {}
        self._removed: list[ir.Node] = []

    def run(self) -> Counter[str]:
        """Tries the rewrites until the worklist is empty."""
        events = self.g.events
        nodes = list(nodes_of(self.graph))
        work: deque[ir.Node] = deque(node for node in nodes if _key(node) in self.table)
        waiting = set(work)
        limit = MAX_FIRINGS_PER_NODE * (len(nodes) + 16)
        while work:
            node = work.popleft()
            waiting.discard(node)
            if node.graph is None:
                continue
            for rewrite in self.table[_key(node)]:
                self.at = rewrite
                started = time.perf_counter_ns() if events is not None else 0
                may_match = rewrite.when is None or self._may_match(rewrite, node)
                again = self._try(node, rewrite) if may_match else None
                if events is not None:
                    events.count("rewrite", rewrite.name, started, hit=again is not None)
                if again is None:
                    continue
                if events is not None:
                    events.fired(rewrite.name, f"{_key(node)} {node.name or ''}".strip())
                self.fired[rewrite.name] += 1
                if self.fired[rewrite.name] > limit:
                    raise ConversionError(
                        f"the rewrite {rewrite.name!r} does not terminate: it fired {self.fired[rewrite.name]} times",
                        hint="It matches its own output. Leave it out, or make its pattern narrower.",
                    )
                for candidate in again:
                    if candidate.graph is not None and candidate not in waiting and _key(candidate) in self.table:
                        waiting.add(candidate)
                        work.append(candidate)
                break
        self.at = None
        if self.fired and not _in_order(self.graph, set()):
            self._sort()
        return self.fired

    def _may_match(self, rewrite: Rewrite, node: ir.Node) -> bool:
        assert rewrite.when is not None
        try:
            return rewrite.when(node)
        except Exception as error:
            raise ConversionError(
                f"the condition (`when`) of the rewrite {rewrite.name!r} raised {type(error).__name__} at {_key(node)}: {error}"
            ) from error

    def _sort(self) -> None:
        """Moves nodes behind the nodes that they read.

        A node may come too late that a rewrite shares with an earlier rewrite, that computes a size for an earlier rewrite,
        or that replaces the results of several nodes.
        """
        try:
            self.graph.sort()
        except ValueError as error:
            names = ", ".join(map(repr, self.fired))
            raise ConversionError(f"a value depends on itself after the rewrites {names}") from error

    def _try(self, node: ir.Node, rewrite: Rewrite) -> list[ir.Node] | None:
        """Applies a rewrite at a node; returns the nodes to try again."""
        g, graph = self.g, node.graph
        assert isinstance(graph, ir.Graph)
        shared = self._shared.get(id(graph))
        if shared is None:
            shared = self._shared[id(graph)] = _Shared(graph)
        firing = _Firing(shared)
        provenance = Rewritten(g.provenance.of.get(node, NOWHERE), rewrite.name)
        with g.scope.nested(scope=firing), g.provenance.converting(None, provenance):
            mark = g.mark()
            try:
                result = rewrite.apply(g, node)
                if result is None:
                    if firing.nodes:
                        g.rollback(mark)
                    return None
                replaced = _checked(node, result, rewrite)
                new_nodes = g.scope.live(replaced.values())
            except ConversionError:
                raise
            except Exception as error:
                raise ConversionError(
                    f"the rewrite {rewrite.name!r} raised {type(error).__name__} at {_key(node)}: {error}"
                ) from error
        self._name(new_nodes)
        graph.insert_before(node, new_nodes)
        shared.keep(firing)
        if graph is not self.graph:
            # Nodes outside of a branch or body can't read a size that was computed in it.
            g.sizes.forget(value for made_node in new_nodes for value in made_node.outputs)
        return [*new_nodes, *self._replace(graph, replaced, provenance)]

    def _replace(self, graph: ir.Graph, replaced: Replaced, provenance: Rewritten) -> list[ir.Node]:
        """Replaces values (old to new) and removes the nodes that nothing needs any more; returns the consumers."""
        consumers: list[ir.Node] = []
        for old, new in replaced.items():
            if new.shape is None or old.shape is not None:
                new.shape = old.shape
            consumers.extend(old.consumers())
            producer = new.producer()
            if producer is not None and is_op(producer, "Identity") and producer.inputs[0] is old:
                self._copy_for_output(graph, old, new)
                continue
            if old.is_graph_output() and (producer is None or producer.graph is not graph or new.is_graph_output()):
                new = self._copied(graph, old, new)
            # The new value takes the name: users find values by it.
            if new.producer() is not None and old.name and not new.is_graph_output():
                old_name, old.name = old.name, None
                new.name = old_name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        pending = [node for old in replaced if (node := old.producer()) is not None]
        while pending:
            dead = pending.pop()
            if dead.graph is not graph or any(v.uses() or v.is_graph_output() for v in dead.outputs):
                continue
            before = [v.producer() for v in dead.inputs if v is not None]
            detach(dead)
            graph.remove(dead)
            self._removed.append(dead)
            provenance.replaced.append((dead.op_type, self.g.provenance.of.get(dead, NOWHERE)))
            self.g.sizes.forget(dead.outputs)
            pending.extend(n for n in before if n is not None)
        return consumers

    def _copy_for_output(self, graph: ir.Graph, value: ir.Value, copy: ir.Value) -> None:
        """Makes a value's copy an output of the graph in its place, under the value's name."""
        name, value.name = value.name, self.g.names.unique(f"{value.name}_inner")
        copy.name = name
        for position, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[position] = copy

    def _copied(self, graph: ir.Graph, old: ir.Value, new: ir.Value) -> ir.Value:
        """A graph's output must be made within the graph, and no value is an output twice."""
        producer = old.producer()
        assert producer is not None
        copy = ir.Value(type=old.type, shape=old.shape)
        node = ir.Node("", "Identity", [new], outputs=[copy])
        self.g.provenance.of[node] = self.g.provenance.of.get(producer, NOWHERE)
        graph.insert_before(producer, [node])
        return copy

    def _name(self, nodes: Iterable[ir.Node]) -> None:
        """Names new values; a name is unique in the whole model, as it is visible in subgraphs."""
        for node in nodes:
            for value in node.outputs:
                if value.name is None:
                    value.name = self.g.names.unique(f"{node.op_type.lower()}_value")


def _key(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _in_order(graph: ir.Graph, before: set[ir.Node]) -> bool:
    """Whether every node of a graph and of its subgraphs comes after the nodes that it reads; adds its own to ``before``."""
    for node in graph:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in before:
                return False
        for inner in graphs_of(node):
            if not _in_order(inner, before):
                return False
        before.add(node)
    return True


def _checked(node: ir.Node, result: Any, rewrite: Rewrite) -> Replaced:
    """A rewrite's result as pairs of old and new values.

    Raises:
        ConversionError: Too few values, or a value of another dtype or rank.
    """
    if isinstance(result, Mapping):
        replaced = dict(result)
        if any(old.producer() is None or old.producer().graph is not node.graph for old in replaced):
            raise ConversionError(f"the rewrite {rewrite.name!r} replaced a value that is not of the graph of its node")
    else:
        values = [result] if isinstance(result, ir.Value) else list(result)
        if len(values) != len(node.outputs):
            raise ConversionError(
                f"the rewrite {rewrite.name!r} returned {len(values)} values for {len(node.outputs)} of {_key(node)}"
            )
        replaced = dict(zip(node.outputs, values, strict=True))
    for old, new in replaced.items():
        if new is old:
            # Equal nodes are shared: the rewrite emitted the node itself that it should replace.
            raise ConversionError(
                f"the rewrite {rewrite.name!r} does not terminate: it replaces {_key(node)} by itself",
                hint="It matches its own output. Leave it out, or make its pattern narrower.",
            )
        if new.dtype is None:
            new.type = old.type
        if new.dtype != old.dtype:
            raise ConversionError(f"the rewrite {rewrite.name!r} changed {old.dtype} to {new.dtype} at {_key(node)}")
        if new.shape is not None and old.shape is not None and len(new.shape) != len(old.shape):
            raise ConversionError(f"the rewrite {rewrite.name!r} changed the rank at {_key(node)}")
    return replaced
