"""Where ONNX Runtime's time goes: its own profile, summed by operator and by module, and the graph that it runs."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxplug_tools.inspection.places import path_of_name
from onnxplug_tools.inspection.view import Seen

_SUFFIX = "_kernel_time"
#: No fusion of ONNX Runtime takes more nodes.
_MOST_FUSED = 64


@dataclass(frozen=True, slots=True)
class Spent:
    """Time that was spent on an operator or in a module, in one run.

    Attributes:
        seconds: Seconds a run, without the time of nodes within.
    """

    name: str
    calls: float
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of a model by operator and by module.

    Attributes:
        seconds: Seconds a run, with profiling on; the time outside of nodes is ONNX Runtime's own.
        operators: Time by operator, the most first.
        modules: Time by module, in the modules' order, without the time of submodules; the model's own nodes have an
            empty path.
        unmapped: Time of nodes that correspond to no module, by ONNX Runtime's names: those that it made, and those that
            have no name in the file.
        optimized: How often each operator occurs in the graph that ONNX Runtime runs; ``None`` where it is not known.
    """

    runs: int
    seconds: float
    operators: tuple[Spent, ...]
    modules: tuple[Spent, ...]
    unmapped: tuple[Spent, ...]
    optimized: dict[str, int] | None

    @property
    def in_nodes(self) -> float:
        """Seconds a run that nodes account for."""
        return sum(spent.seconds for spent in self.operators)


def read_profile(path: Path, seen: Seen, optimized: ir.Model | None, skipped: int) -> Profile:
    """Reads the file that ONNX Runtime wrote.

    Args:
        skipped: Runs to leave out: the first runs are slower.
    """
    events = json.loads(path.read_text(encoding="utf-8"))
    runs = sorted((e for e in events if e["cat"] == "Session" and e["name"] == "model_run"), key=lambda e: e["ts"])[
        skipped:
    ]
    begin = runs[0]["ts"] if runs else 0
    nodes = [e for e in events if e["cat"] == "Node" and e["name"].endswith(_SUFFIX) and e["ts"] >= begin]
    own = _own_times(nodes)
    module_of = _Modules(seen, optimized)
    by_operator: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    by_module: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    unmapped: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event, microseconds in zip(nodes, own, strict=True):
        name = event["name"].removesuffix(_SUFFIX)
        module = module_of(name)
        tables = [(by_operator, event["args"].get("op_name", "?"))]
        tables.append((unmapped, name) if module is None else (by_module, module))
        for table, key in tables:
            table[key][0] += 1
            table[key][1] += microseconds / 1e6
    count, total = max(1, len(runs)), sum(own) / 1e6

    def spent(table: Mapping[str, list[float]]) -> list[Spent]:
        return [
            Spent(name, calls / count, seconds / count, seconds / total if total else 0.0)
            for name, (calls, seconds) in table.items()
        ]

    order = {path: position for position, path in enumerate(_paths(seen))}
    return Profile(
        runs=len(runs),
        seconds=sum(e["dur"] for e in runs) / 1e6 / count,
        operators=tuple(sorted(spent(by_operator), key=lambda s: -s.seconds)),
        modules=tuple(sorted(spent(by_module), key=lambda s: order.get(s.name, len(order)))),
        unmapped=tuple(sorted(spent(unmapped), key=lambda s: -s.seconds)),
        optimized=None if optimized is None else operators_of(optimized),
    )


def operators_of(model: ir.Model) -> dict[str, int]:
    """How often each operator occurs, bodies included, the most frequent first."""
    names = (
        f"{n.domain}::{n.op_type}" if n.domain not in ("", "ai.onnx") else n.op_type for n in model.graph.all_nodes()
    )
    return dict(Counter(names).most_common())


def _paths(seen: Seen) -> Iterable[str]:
    pending = [seen.view.root]
    while pending:
        module = pending.pop()
        yield module.path
        pending += reversed(module.children)


def _own_times(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Microseconds of each event without those of the events within it: a node with a body runs others."""
    own = [float(event["dur"]) for event in events]
    order = sorted(range(len(events)), key=lambda i: (events[i].get("tid", 0), events[i]["ts"], -events[i]["dur"]))
    around: list[int] = []
    for i in order:
        event = events[i]
        while around and not (
            events[around[-1]].get("tid", 0) == event.get("tid", 0)
            and event["ts"] + event["dur"] <= events[around[-1]]["ts"] + events[around[-1]]["dur"]
            and events[around[-1]]["args"].get("op_name") in _WITH_BODIES
        ):
            around.pop()
        if around:
            own[around[-1]] = max(0.0, own[around[-1]] - event["dur"])
        around.append(i)
    return own


#: The only operators that run other nodes. Times are whole microseconds: neighbours may seem to be within each other.
_WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap", "BeamSearch", "GreedySearch", "Sampling"})


class _Modules:
    """The module of a node that ONNX Runtime ran, by its name; ``None`` where none corresponds. A model without modules is one.

    A name is that of a node of the model, or of a node that ONNX Runtime made. For the latter, the graph that ONNX
    Runtime ran has the model's values that the node computes, or its name begins with the name of a node that it
    replaced.
    """

    def __init__(self, seen: Seen, optimized: ir.Model | None) -> None:
        self._modules = {module for module in _paths(seen) if module}
        self._by_name: dict[str, str | None] = {}
        for node in seen.view.nodes:
            if node.name:
                known = self._by_name.get(node.name, node.module)
                self._by_name[node.name] = node.module if known == node.module else None
        self._by_result: dict[str, str | None] = {}
        if optimized is not None:
            self._trace(seen, optimized)

    def _trace(self, seen: Seen, optimized: ir.Model) -> None:
        """Finds the modules of the nodes that ONNX Runtime made, by the values that they compute."""
        made = {value.name: node for node in seen.nodes for value in node.outputs if value.name}
        kept = {value.name for node in optimized.graph.all_nodes() for value in node.outputs}
        for node in optimized.graph.all_nodes():
            values = [made[value.name] for value in node.outputs if value.name in made]
            if not values:  # its result is for the next node: a reordered copy, for example
                readers = [use.node for value in node.outputs for use in value.uses()]
                values = [made[value.name] for reader in readers for value in reader.outputs if value.name in made]
            if node.name and values:
                module = seen.nodes[_replaced(node.op_type, values[0], kept)].module
                known = self._by_result.get(node.name, module)
                self._by_result[node.name] = module if known == module else None

    def __call__(self, name: str) -> str | None:
        if not self._modules:
            return ""
        if name in self._by_name:
            return self._by_name[name]
        # A product and its activation are "fused PRODUCT": their time is the product's.
        fused = self._before(name.removeprefix("fused "), "[/ ]")
        if fused is not None:
            return fused
        if name in self._by_result:
            return self._by_result[name]
        path = path_of_name(name)
        return path if path in self._modules else self._before(name, "_")

    def _before(self, name: str, separators: str) -> str | None:
        """The module of the node whose name a name begins with, before one of the separators."""
        ends = [len(name), *(match.start() for match in reversed(list(re.finditer(separators, name))))]
        return next((self._by_name[name[:end]] for end in ends if name[:end] in self._by_name), None)


def _replaced(op_type: str, last: ir.Node, kept: Collection[str | None]) -> ir.Node:
    """The replaced node to which the time of a fused node belongs: the node of the same operator, or the last node.

    Args:
        op_type: The operator of the fused node: a Conv that also computes the activation after it.
        last: The last of the replaced nodes.
        kept: The names of the values of the optimised graph: nodes that compute these are not part of the fused node.
    """
    wanted = op_type.removeprefix("Fused")
    pending, looked = [last], 0
    while pending and looked < _MOST_FUSED:
        node = pending.pop(0)
        looked += 1
        if node.op_type == wanted:
            return node
        producers = [value.producer() for value in node.inputs if value is not None and value.name not in kept]
        pending += [producer for producer in producers if producer is not None]
    return last
