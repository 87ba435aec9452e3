"""The nodes of a model that a target would leave to ONNX Runtime's CPU or fail on, by the table of the target."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from onnxplug.build.provenance import SOURCE
from onnxplug.errors import UsageError
from onnxplug.text import did_you_mean
from onnxplug_targets.features import features, graphs_of, must_be_known, since_of
from onnxplug_targets.forms import DTYPES
from onnxplug_targets.groups import groups_left, is_circular, is_together
from onnxplug_targets.maxima import mistaken
from onnxplug_targets.table import WRONG, load

_ONNX = ("", "ai.onnx")
#: The reason that a node is not computed, and the failure; ``None`` for a node that is computed.
_Judgement: TypeAlias = tuple[str, str] | None
_MISTAKEN = ("it reads a Concat of two parts, which are compared element by element instead", WRONG)


@dataclass(frozen=True)
class Fallback:
    """A node that a target does not compute.

    Attributes:
        node: Its name.
        operator: Its operator.
        reason: The reason, such as the features that are refused.
        breaks: The failure where the target takes the node and fails on it; empty where the node is left to the CPU.
        place: The user's ``file:line``; empty if the model does not have it.
    """

    node: str
    operator: str
    reason: str
    breaks: str = ""
    place: str = ""

    @property
    def consequence(self) -> str:
        """The consequence, in words."""
        return consequence(self.breaks)


def consequence(breaks: str) -> str:
    """The consequence for a node, in words."""
    if not breaks or breaks == WRONG:
        return breaks or "left to the CPU"
    return f"the model does not run: {breaks}"


def fallbacks_of(model: Any, target: str) -> list[Fallback]:
    """See :func:`onnxplug_targets.fallbacks`."""
    from onnxplug_targets import TARGETS

    name = target.removeprefix("onnxruntime:")
    if name not in TARGETS:
        raise UsageError(f"target {target!r} is unknown", hint=did_you_mean(name, TARGETS))
    if isinstance(model, str | os.PathLike):
        model = _read(os.fspath(model))
    return list(Judge(load(name)).fallbacks(getattr(model, "model", model)))


def _read(path: str) -> ir.Model:
    """A file's model, with the types and shapes of its values."""
    import onnx
    import onnx.inliner

    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    except Exception as error:
        raise UsageError(f"{path} is no ONNX file: {error}") from error
    with contextlib.suppress(Exception):  # what the file lacks then stays unknown
        if model.functions:  # their values have no types in a file
            model = onnx.inliner.inline_local_functions(model)
        model = onnx.shape_inference.infer_shapes(model)
    try:
        return ir.from_proto(model)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UsageError(f"{path} can't be read by onnx_ir: {cause}") from error


def inlined(model: ir.Model) -> ir.Model:
    """The model with the nodes of functions in the place of their calls, as runtimes give them to providers."""
    if not model.functions:
        return model
    from onnx_ir.passes.common import InlinePass

    try:
        return InlinePass()(model.clone()).model
    except Exception:  # functions of another opset, or with graphs as attributes
        return model


class Judge:
    """Judges nodes by a table.

    Args:
        table: The table of a target, as :mod:`onnxplug_targets.table` writes it.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table
        self._entries: dict[tuple[str, str], _Entry] = {}

    def fallbacks(self, model: ir.Model) -> Iterator[Fallback]:
        """The nodes that are not computed; a node of a subgraph counts for its owner, one of a function at each call."""
        model = inlined(model)
        opset = next((model.opset_imports[name] for name in _ONNX if name in model.opset_imports), 1)
        known = {function.identifier()[:2] for function in model.functions.values()}
        judged = {
            node: self.judge(node, opset)
            for graph in (model.graph, *model.functions.values())
            for node in graph
            if not (node.domain in _ONNX and node.op_type == "Constant") and (node.domain, node.op_type) not in known
        }
        if self.table.get("overlooks_subgraphs"):
            left = [node for node, judgement in judged.items() if judgement is not None]
            if is_circular(model.graph, left):
                reason = "a group of nodes is computed before and after a loop that reads of it, so that ONNX Runtime takes none"
                judged = {node: judgement or (reason, "") for node, judgement in judged.items()}
        if self.table.get("leaves_groups"):
            judged |= self._of_groups(model.graph, judged)
        for node, judgement in judged.items():
            if judgement is not None:
                operator = f"{node.domain}::{node.op_type}" if node.domain not in _ONNX else node.op_type
                yield Fallback(node.name or "", operator, *judgement, node.metadata_props.get(SOURCE, ""))

    def _of_groups(self, graph: ir.Graph, judged: Mapping[ir.Node, _Judgement]) -> dict[ir.Node, _Judgement]:
        """The judgements of nodes that are left or computed otherwise only because of the nodes around them."""
        # A node that breaks is taken.
        left = {node for node, judgement in judged.items() if judgement is not None and not judgement[1]}
        reason = "its group is this node alone, or has a Conv or an Identity that a node outside reads"
        found: dict[ir.Node, _Judgement] = {
            node: (reason, "") for node in groups_left(graph, left) if judged.get(node, "") is None
        }
        for node, judgement in judged.items():
            concat = self._mistaken(node) if judgement is None and node not in found else None
            if concat is None or concat in left or concat in found:
                continue
            if node.graph is not graph or is_together(graph, left, node, concat):
                found[node] = _MISTAKEN
        return found

    def judge(self, node: ir.Node, opset: int) -> _Judgement:
        """The reason that a node is not computed, and the failure; ``None`` for a node that is computed."""
        since = since_of(node, opset) if node.domain in _ONNX else None
        if since is None:
            return f"the domain {node.domain} is not in the table", ""
        present, entry = features(node, opset), self._entry(node.op_type, str(since))
        breaks = next((why for reason, why in entry.breaks if reason <= present), "")
        if entry.known is None:
            return entry.reason, breaks
        refused = next((r for r in entry.refused if r <= present), None) or next(
            (r for r, _ in entry.breaks if r <= present), None
        )
        if refused is not None:
            return _words(refused), breaks
        first = next((value for value in (*node.inputs, *node.outputs) if value is not None), None)
        if entry.documented:
            dtype = first.dtype.name.lower() if first is not None and first.dtype is not None else "an unknown type"
            unknown = set() if dtype in entry.known else {dtype}
        else:
            unknown = {feature for feature in present - entry.known if must_be_known(feature)}
        if unknown:
            return f"{_words(unknown)} is not in the table", ""
        for inner in (inner for graph in graphs_of(node) for inner in graph):
            judged = self.judge(inner, opset) if inner.op_type != "Constant" else None
            if judged is None and self._mistaken(inner) is not None:
                judged = _MISTAKEN
            if judged is not None:
                return f"{inner.op_type} in it: {judged[0]}", judged[1]
        return None

    def _mistaken(self, node: ir.Node) -> ir.Node | None:
        """The Concat of a reduction that the provider mistakes, see :func:`onnxplug_targets.maxima.mistaken`."""
        return mistaken(node) if self.table.get("mistakes_maxima") and node.domain in _ONNX else None

    def _entry(self, op: str, since: str) -> _Entry:
        entry = self._entries.get((op, since))
        if entry is None:
            entry = self._entries[op, since] = self._read(op, since)
        return entry

    def _read(self, op: str, since: str) -> _Entry:
        if "types" in self.table:
            return self._documented(op, since)
        versions = self.table["operators"].get(op, {})
        if since in versions:
            row = versions[since]
            return _Entry(frozenset(row["known"]), _sets(row["refused"]), _broken(row["breaks"]))
        absent = self.table["absent"].get(op, {})
        reason = f"no kernel of version {since}, but of {', '.join(versions)}" if versions else "no kernel"
        return _Entry(None, [], _broken(absent.get(since, ())), reason)

    def _documented(self, op: str, since: str) -> _Entry:
        text, newest = self.table["types"].get(op), self.table["opsets"][1]
        if text is None or int(since) > newest:
            return _Entry(None, [], [], "not documented" if text is None else f"documented up to opset {newest}")
        types = documented_types(text)
        letters = types.get(since, types.get(""))
        if letters is None:
            return _Entry(None, [], [], f"no kernel of version {since}, but of {', '.join(types)}")
        names = frozenset(DTYPES[letter] for letter in letters)
        return _Entry(names, _sets(self.table["refused"].get(op, ())), [], documented=True)


@dataclass(frozen=True)
class _Entry:
    """The table's entry for a version of an operator.

    Attributes:
        known: Types and attributes of nodes that were taken; ``None`` where no node was taken.
        refused: Sets of features that were refused.
        breaks: Sets of features that break, each with the failure.
        reason: The reason that no node is taken.
        documented: Whether the entry comes from documentation: ``known`` are then the types of the first operand.
    """

    known: frozenset[str] | None
    refused: list[frozenset[str]]
    breaks: list[tuple[frozenset[str], str]]
    reason: str = ""
    documented: bool = False


def documented_types(text: str) -> dict[str, str]:
    """The letters of the types that each version of an operator takes (``"13,14=fh; 15=f"``); ``""``: all versions."""
    types: dict[str, str] = {}
    for part in text.split("; "):
        versions, _, letters = part.rpartition("=")
        types |= dict.fromkeys(versions.split(","), letters)
    return types


def _sets(rows: Any) -> list[frozenset[str]]:
    return [frozenset(row) for row in rows]


def _broken(rows: Any) -> list[tuple[frozenset[str], str]]:
    return [(frozenset(row[:-1]), row[-1]) for row in rows]


def _words(features: frozenset[str] | set[str]) -> str:
    return " and ".join(sorted(features))


def summary(fallbacks: list[Fallback]) -> list[tuple[str, str, str, int, list[str]]]:
    """Fallbacks by kind, failures first: the operator, the reason, the failure, the number and the user's lines."""
    groups: dict[tuple[str, str, str], list[Fallback]] = defaultdict(list)
    for item in fallbacks:
        groups[item.operator, item.reason, item.breaks].append(item)
    rows = [
        (*kind, len(items), list(dict.fromkeys(item.place for item in items if item.place)))
        for kind, items in groups.items()
    ]
    return sorted(rows, key=lambda row: (not row[2], -row[3]))
