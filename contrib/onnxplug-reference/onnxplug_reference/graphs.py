"""Graphs made ready to run: each node with its kernel, its subgraphs, and the values that it is the last to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx

from onnxplug.errors import EvaluationError
from onnxplug_reference.arrays import Arrays

FunctionKey = tuple[str, str, str]
#: A function that computes a node: inputs (``None`` for an absent input) to outputs.
Compute = Callable[[Sequence[Any]], Sequence[Any]]
_GRAPH, _GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS


class Resolver(Protocol):
    """A finder of the kernels of operators."""

    def compute(self, node: onnx.NodeProto, opsets: Mapping[str, int], library: Library) -> Compute | None:
        """The kernel of a node; ``None`` if there is none.

        Args:
            node: The node, without references to attributes of a function.
        """

    def comes_first(self, domain: str, op_type: str, version: int) -> bool:
        """Whether a kernel of the call or of a plugin replaces the model's own function of an operator."""


@dataclass
class ReadyNode:
    """A node made ready.

    Attributes:
        compute: Its kernel; ``None`` for control flow and functions.
        last_uses: Names of values that no later node reads.
    """

    proto: onnx.NodeProto
    version: int
    compute: Compute | None = None
    graphs: dict[str, ReadyGraph] = field(default_factory=dict)
    body: ReadyGraph | None = None
    last_uses: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Operator and name, for messages."""
        domain = f"{self.proto.domain}::" if self.proto.domain not in ("", "ai.onnx") else ""
        name = f" {self.proto.name!r}" if self.proto.name else ""
        return f"{domain}{self.proto.op_type}{name}"


@dataclass
class ReadyGraph:
    """A graph made ready.

    Attributes:
        captured: Names that it reads from the graphs around it.
    """

    inputs: list[str]
    outputs: list[str]
    types: dict[str, onnx.TypeProto]
    initializers: dict[str, Any]
    nodes: list[ReadyNode]
    captured: frozenset[str]


class Library:
    """The functions of a model, each made ready once for every set of attributes of its calls."""

    def __init__(self, functions: Iterable[onnx.FunctionProto]) -> None:
        self.functions: dict[FunctionKey, onnx.FunctionProto] = {}
        for function in functions:
            key = (_domain(function.domain), function.name, getattr(function, "overload", ""))
            self.functions.setdefault(key, function)
        self.ready: dict[tuple[FunctionKey, bytes], ReadyGraph] = {}
        self.open: list[FunctionKey] = []

    def find(self, node: onnx.NodeProto) -> onnx.FunctionProto | None:
        """The function that a node calls; ``None`` where it calls none."""
        return self.functions.get((_domain(node.domain), node.op_type, getattr(node, "overload", "")))


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


class Preparer:
    """Makes graphs ready.

    Args:
        control: Operators of ai.onnx whose subgraphs the engine runs.
    """

    def __init__(self, resolver: Resolver, arrays: Arrays, library: Library, control: Iterable[str]) -> None:
        self._resolver = resolver
        self._arrays = arrays
        self._library = library
        self._control = frozenset(control)

    def graph(self, proto: onnx.GraphProto, opsets: Mapping[str, int]) -> ReadyGraph:
        """Makes a graph ready."""
        initializers = {t.name: self._tensor(t) for t in proto.initializer}
        initializers |= {t.values.name: self._arrays.constant(t) for t in proto.sparse_initializer}
        types = {v.name: v.type for v in (*proto.value_info, *proto.input, *proto.output)}
        names = [v.name for v in proto.input], [v.name for v in proto.output]
        return self._ready(*names, types, initializers, proto.node, opsets)

    def _tensor(self, tensor: onnx.TensorProto) -> Any:
        if onnx.external_data_helper.uses_external_data(tensor):
            raise EvaluationError(
                f"the weight {tensor.name!r} is in a file that was not read with the model",
                hint="Give the model's path, or read it with onnx.load(path).",
            )
        return self._arrays.constant(tensor)

    def function(self, proto: onnx.FunctionProto, call_attributes: Iterable[onnx.AttributeProto] = ()) -> ReadyGraph:
        """Makes a function ready for the attributes of one call."""
        attributes = {a.name: a for a in proto.attribute_proto} | {a.name: a for a in call_attributes}
        key = (_domain(proto.domain), proto.name, getattr(proto, "overload", ""))
        memo = (key, b"".join(attributes[name].SerializeToString(deterministic=True) for name in sorted(attributes)))
        library = self._library
        if memo not in library.ready:
            if key in library.open:
                raise EvaluationError(f"the function {key[0]}::{key[1]} calls itself, which ONNX does not allow")
            opsets = {_domain(o.domain): o.version for o in proto.opset_import}
            library.open.append(key)
            try:
                nodes = [substituted(node, attributes) for node in proto.node]
                types = {v.name: v.type for v in proto.value_info}
                library.ready[memo] = self._ready(list(proto.input), list(proto.output), types, {}, nodes, opsets)
            finally:
                library.open.pop()
        return library.ready[memo]

    def node(self, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> ReadyGraph:
        """Makes a node ready as a graph of its own."""
        return self._ready([n for n in proto.input if n], [n for n in proto.output if n], {}, {}, [proto], opsets)

    def _ready(
        self,
        inputs: list[str],
        outputs: list[str],
        types: dict[str, onnx.TypeProto],
        initializers: dict[str, Any],
        protos: Iterable[onnx.NodeProto],
        opsets: Mapping[str, int],
    ) -> ReadyGraph:
        nodes = [self._node(proto, opsets) for proto in protos]
        made = {*inputs, *initializers}
        captured: set[str] = set()
        for node in nodes:
            captured |= _reads(node) - made
            made.update(node.proto.output)
        captured |= {name for name in outputs if name not in made}
        seen = {*outputs, *captured, *initializers}
        for node in reversed(nodes):
            # Unread outputs of a node are freed, too.
            names = (_reads(node) | {n for n in node.proto.output if n}) - seen
            node.last_uses = tuple(sorted(names))
            seen |= names
        return ReadyGraph(inputs, outputs, types, initializers, nodes, frozenset(captured))

    def _node(self, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> ReadyNode:
        domain = _domain(proto.domain)
        version = opsets.get(domain)
        replaced = self._resolver.comes_first(domain, proto.op_type, version if version is not None else 1)
        function = None if replaced else self._library.find(proto)
        if version is None and function is None:
            known = ", ".join(f"{name or 'ai.onnx'} {number}" for name, number in opsets.items())
            raise EvaluationError(
                f"the model imports no version of the domain {domain or 'ai.onnx'!r} that its node {proto.op_type} "
                f"{proto.name!r} is of; it imports {known or 'none'}"
            )
        node = ReadyNode(proto, version if version is not None else 1)
        if function is not None:
            node.body = self.function(function, proto.attribute)
            return node
        if domain == "" and proto.op_type in self._control:
            node.graphs = {a.name: self.graph(a.g, opsets) for a in proto.attribute if a.type == _GRAPH}
            return node
        node.compute = self._resolver.compute(proto, opsets, self._library)
        if node.compute is None:
            raise EvaluationError(
                f"nothing computes {domain or 'ai.onnx'}::{proto.op_type} (version {version}) of the node {proto.name!r}",
                hint="A plugin supplies a kernel as a ReferenceOp through its hook onnxplug_runtime, a call through "
                "new_ops=[…]; a function of the model may compute it too.",
            )
        return node


def _reads(node: ReadyNode) -> set[str]:
    """The names that a node reads, captured names of its subgraphs included."""
    names = {name for name in node.proto.input if name}
    for graph in node.graphs.values():
        names |= graph.captured
    if node.compute is not None:
        for attribute in node.proto.attribute:  # subgraphs of a plugin's operator, which the engine does not run
            for graph in (attribute.g,) if attribute.type == _GRAPH else attribute.graphs:
                names |= captured_names(graph)
    return names


def captured_names(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph reads from the graphs around it, names that its own subgraphs read included."""
    made = {v.name for v in (*graph.input, *graph.initializer)} | {t.values.name for t in graph.sparse_initializer}
    captured: set[str] = set()
    for node in graph.node:
        reads = {name for name in node.input if name}
        for attribute in node.attribute:
            for nested in (attribute.g,) if attribute.type == _GRAPH else attribute.graphs:
                reads |= captured_names(nested)
        captured |= reads - made
        made.update(node.output)
    return captured | {v.name for v in graph.output if v.name not in made}


def substituted(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """A node of a function's body with attributes from the call; attributes that the call lacks are left out."""
    if not any(a.ref_attr_name or a.type in (_GRAPH, _GRAPHS) for a in node.attribute):
        return node
    result = onnx.NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        source = attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if source is None:
            continue
        added = result.attribute.add()
        added.CopyFrom(source)
        added.name = attribute.name
        for graph in (added.g,) if added.type == _GRAPH else added.graphs:
            nodes = [substituted(inner, attributes) for inner in graph.node]
            del graph.node[:]
            graph.node.extend(nodes)
    return result
