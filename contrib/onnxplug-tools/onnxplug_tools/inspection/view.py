"""The content of a model, by one pass over its nodes: a picture of plain values, without the graph and the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxplug.build.scope import graphs_of
from onnxplug_tools.inspection.costs import Costs
from onnxplug_tools.inspection.dims import Dim
from onnxplug_tools.inspection.places import Place, normal_path, place_of
from onnxplug_tools.inspection.words import attribute_text, tensor_bytes, text_of, type_text


@dataclass(frozen=True, slots=True)
class ValueView:
    """A value.

    Attributes:
        name: Its name; empty for an absent optional input.
        dtype: Element type, ``"float"`` or ``"int64"``; ``"sequence(float)"`` for a value that is no tensor; ``None``
            where it is not known.
        shape: Sizes, names or expressions of dynamic sizes, ``None`` for an unknown size; ``None`` where the rank is
            unknown.
    """

    name: str
    dtype: str | None
    shape: tuple[Dim, ...] | None

    @property
    def type(self) -> str:
        """Dtype and shape: ``"float[batch, 3]"``; ``?`` stands for an unknown dtype, size or shape."""
        dims = "?" if self.shape is None else ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.dtype or '?'}[{dims}]"


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node.

    Attributes:
        index: Its number in :attr:`ModelView.nodes`.
        op_type, domain: The operator; the domain of ai.onnx is empty.
        graph: Empty for the main graph; ``"NODE/ATTRIBUTE"`` in the body of a node, after the name of the graph around
            the node; ``"DOMAIN::NAME"`` in a function.
        module: Path of its module, ``"layers.0.linear"``; empty for the model itself. In a function it is relative to
            the function.
        classes: The classes of the modules that it is part of, the outermost first, as far as they are known.
        rule, package, version: The converter and its package, from full metadata.
        source: The user's ``file:line``.
        flops: Estimated operations, of its bodies too (`onnxplug_tools.inspection.flops`); ``None`` where there is no estimate.
    """

    index: int
    name: str
    op_type: str
    domain: str
    graph: str
    module: str
    classes: tuple[str, ...]
    inputs: tuple[ValueView, ...]
    outputs: tuple[ValueView, ...]
    attributes: dict[str, str]
    rule: str | None = None
    package: str | None = None
    version: str | None = None
    source: str | None = None
    rewritten: tuple[str, ...] = ()
    flops: int | None = None

    @property
    def operator(self) -> str:
        """Domain and operator: ``"Conv"`` of ai.onnx, ``"com.microsoft::Gelu"``."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type


@dataclass(frozen=True, slots=True)
class WeightView:
    """An initializer, or the tensor of a ``Constant``.

    Attributes:
        bytes: Bytes of the elements; of text, of the characters.
        location: The file that holds the elements, as the model names it; ``None`` for the model's own file.
        module: Path of the module that it belongs to, by its name or else by the first node that reads it.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    bytes: int
    location: str | None
    module: str

    @property
    def type(self) -> str:
        """Dtype and shape: ``"float[4, 3]"``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim if isinstance(dim, int) else 0
        return count


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A module with its nodes, weights and submodules.

    Attributes:
        path: Its path, ``"layers.0"``; empty for the model itself.
        classes: Its class; several where its calls have different classes, none where it is not known.
        nodes: Its own nodes: those of the main graph and of the bodies of nodes. Functions are left out.
        total_nodes: Its own nodes and those of its submodules; the other totals likewise.
        parameters: Elements of its own weights, buffers and constants among them.
        bytes: Bytes of its own weights.
        flops: Estimated operations of its own nodes, as far as there are estimates.
        unestimated: Number of nodes without an estimate, among its own nodes and the nodes that they run.
        children: Its submodules, in the order of their first nodes.
    """

    path: str
    classes: tuple[str, ...]
    nodes: int
    total_nodes: int
    parameters: int
    total_parameters: int
    bytes: int
    total_bytes: int
    flops: int
    total_flops: int
    unestimated: int
    total_unestimated: int
    children: tuple[ModuleView, ...]

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class FunctionView:
    """A model-local function.

    Attributes:
        nodes: How many nodes it has, those of bodies among them.
        calls: How many nodes of the model, or of its functions, call it.
    """

    domain: str
    name: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: int
    calls: int

    @property
    def operator(self) -> str:
        """Domain and name: ``"onnxplug.modules::Block"``."""
        return f"{self.domain}::{self.name}" + (f":{self.overload}" if self.overload else "")


@dataclass(frozen=True, slots=True)
class ModelView:
    """The content of a model.

    Attributes:
        producer: The program that wrote it, with its version; may be empty.
        opsets: Domain to version; the domain of ai.onnx is empty.
        inputs, outputs: The main graph's inputs and outputs; initializers are no inputs.
        nodes: All nodes: each node of the main graph followed by those of its bodies, then those of functions.
        weights: Initializers of all graphs, and the tensors of ``Constant`` nodes.
        operators: How often each operator occurs, the most frequent first; nodes of functions are left out, calls are not.
        bytes_by_dtype: Bytes of weights by their element type, the most first.
    """

    name: str
    producer: str
    ir_version: int
    opsets: dict[str, int]
    metadata: dict[str, str]
    inputs: tuple[ValueView, ...]
    outputs: tuple[ValueView, ...]
    nodes: tuple[NodeView, ...]
    weights: tuple[WeightView, ...]
    root: ModuleView
    operators: dict[str, int]
    bytes_by_dtype: dict[str, int]
    functions: tuple[FunctionView, ...]


def view(model: ir.Model, sizes: Mapping[str, int] | None = None) -> ModelView:
    """The content of a model; no weight is loaded, and the model is not changed.

    Modules, lines and rules come from the metadata of nodes: onnxplug's, short or full, or ``torch.onnx.export``'s.
    Without metadata, modules come from the nodes' names, ``"layers/0/linear/Gemm"``; a model that has neither is one
    module.

    Args:
        model: The model.
        sizes: Sizes of dynamic dimensions by name, for the estimates of operations.
    """
    return _Viewer(model, sizes or {}).view()


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture beside the model that it shows.

    Attributes:
        nodes: The view of each node.
        weights: The view of each weight, with its tensor; the key of a ``Constant`` is its result.
    """

    view: ModelView
    nodes: dict[ir.Node, NodeView]
    weights: dict[ir.Value, tuple[WeightView, ir.TensorProtocol]]


def view_with_model(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Seen:
    """As :func:`view`, with the view of each node and weight."""
    viewer = _Viewer(model, sizes or {})
    return Seen(viewer.view(), viewer.by_node, viewer.by_weight)


@dataclass(slots=True)
class _Sums:
    """The sums over one module's own nodes and weights."""

    nodes: int = 0
    parameters: int = 0
    bytes: int = 0
    flops: int = 0
    unestimated: int = 0
    classes: dict[str, None] = field(default_factory=dict)


class _Viewer:
    def __init__(self, model: ir.Model, sizes: Mapping[str, int]) -> None:
        self._model = model
        self._costs = Costs(model, sizes)
        self._nodes: list[NodeView] = []
        self.by_node: dict[ir.Node, NodeView] = {}
        self.by_weight: dict[ir.Value, tuple[WeightView, ir.TensorProtocol]] = {}
        self._weights: list[WeightView] = []
        self._sums: dict[str, _Sums] = {"": _Sums()}
        self._operators: Counter[str] = Counter()
        self._calls: Counter[ir.OperatorIdentifier] = Counter()
        self._values: dict[ir.Value, ValueView] = {}
        self._read_in: dict[ir.Value, str] = {}
        self._constants: list[tuple[ir.Value, ir.TensorProtocol, str]] = []

    def view(self) -> ModelView:
        model = self._model
        graph = model.graph
        stored = self._walk(graph, "", counted=True)
        functions = []
        for identifier, function in model.functions.items():
            before = len(self._nodes)
            stored += self._walk(function.graph, "::".join(map(text_of, identifier[:2])), counted=False)
            functions.append((identifier, function, len(self._nodes) - before))
        self._weigh(stored)
        by_dtype: Counter[str] = Counter()
        for weight in self._weights:
            by_dtype[weight.dtype] += weight.bytes
        return ModelView(
            name=text_of(graph.name),
            producer=f"{text_of(model.producer_name)} {text_of(model.producer_version)}".strip(),
            ir_version=model.ir_version,
            opsets={text_of(domain): version for domain, version in model.opset_imports.items()},
            metadata={
                text_of(key): text_of(value) for key, value in {**model.metadata_props, **graph.metadata_props}.items()
            },
            inputs=tuple(self._value(v) for v in graph.inputs if v.name not in graph.initializers),
            outputs=tuple(self._value(v) for v in graph.outputs),
            nodes=tuple(self._nodes),
            weights=tuple(self._weights),
            root=self._tree(),
            operators=dict(self._operators.most_common()),
            bytes_by_dtype=dict(by_dtype.most_common()),
            functions=tuple(
                FunctionView(
                    domain=text_of(identifier[0]),
                    name=text_of(identifier[1]),
                    overload=text_of(identifier[2]),
                    inputs=tuple(text_of(v.name) for v in function.inputs),
                    outputs=tuple(text_of(v.name) for v in function.outputs),
                    nodes=count,
                    calls=self._calls[identifier],
                )
                for identifier, function, count in functions
            ),
        )

    def _walk(self, graph: ir.Graph, label: str, *, counted: bool) -> list[ir.Value]:
        """Takes the nodes of a graph and of its nodes' bodies, and returns their initializers."""
        stored = list(graph.initializers.values())
        # The bodies of a node come before its successor, without recursion: bodies may be nested as deep as a file likes.
        pending = [(iter(graph), label, counted)]
        while pending:
            nodes, label, costed = pending[-1]
            node = next(nodes, None)
            if node is None:
                pending.pop()
                continue
            self._take(node, label, counted=counted, costed=costed)
            inner = graphs_of(node)
            if inner:
                labels = _labels(node, label, inner)
                pending += [
                    (iter(body), name, False) for body, name in zip(reversed(inner), reversed(labels), strict=True)
                ]
                stored += [value for body in inner for value in body.initializers.values()]
        return stored

    def _take(self, node: ir.Node, label: str, *, counted: bool, costed: bool) -> None:
        place = place_of(text_of(node.name), node.metadata_props)
        cost = self._costs.of(node)
        domain = "" if node.domain == "ai.onnx" else node.domain
        view = NodeView(
            index=len(self._nodes),
            name=text_of(node.name),
            op_type=text_of(node.op_type),
            domain=text_of(domain),
            graph=label,
            module=place.module,
            classes=place.classes,
            inputs=tuple([_ABSENT if value is None else self._value(value) for value in node.inputs]),
            outputs=tuple([self._value(value) for value in node.outputs]),
            attributes={text_of(name): attribute_text(attribute) for name, attribute in node.attributes.items()},
            rule=place.rule,
            package=place.package,
            version=place.version,
            source=place.source,
            rewritten=place.rewritten,
            flops=cost.flops,
        )
        self._nodes.append(view)
        self.by_node[node] = view
        self._calls[node.op_identifier()] += 1
        for value in node.inputs:
            if value is not None and value.const_value is not None:
                self._read_in.setdefault(value, place.module)
        if node.op_type == "Constant" and "value" in node.attributes and node.outputs:
            tensor = node.attributes["value"].value
            if isinstance(tensor, ir.TensorProtocol):
                self._constants.append((node.outputs[0], tensor, place.module if counted else ""))
        if not counted:
            return
        self._operators[view.operator] += 1
        sums = self._module(place)
        sums.nodes += 1
        if costed:
            sums.flops += cost.flops or 0
            sums.unestimated += cost.missing

    def _module(self, place: Place) -> _Sums:
        for path, kind in place.modules:
            sums = self._sums.get(path)
            if sums is None:
                for dot in [position for position, letter in enumerate(path) if letter == "."]:
                    self._sums.setdefault(path[:dot], _Sums())  # a list of modules is never called itself
                sums = self._sums[path] = _Sums()
            if kind:
                sums.classes[kind] = None
        return self._sums[place.module]

    def _value(self, value: ir.Value) -> ValueView:
        view = self._values.get(value)
        if view is None:
            shape = value.shape
            dims = None if shape is None else tuple([_dim(d) for d in shape])
            view = self._values[value] = ValueView(text_of(value.name), type_text(value.type), dims)
        return view

    def _weigh(self, stored: Iterable[ir.Value]) -> None:
        for value in stored:
            if value.const_value is not None:
                self._weight(value, value.const_value, self._owner(value))
        for value, tensor, module in self._constants:
            self._weight(value, tensor, module)

    def _weight(self, value: ir.Value, tensor: ir.TensorProtocol, module: str) -> None:
        dims = tuple([d if isinstance(d, int) else getattr(d, "value", None) for d in tensor.shape])
        location = tensor.location if isinstance(tensor, ir.ExternalTensor) else None
        view = WeightView(
            text_of(value.name),
            tensor.dtype.name.lower(),
            dims,
            tensor_bytes(tensor),
            None if location is None else str(location),
            module,
        )
        self._weights.append(view)
        self.by_weight[value] = view, tensor
        sums = self._sums.setdefault(module, _Sums())
        sums.parameters += view.elements
        sums.bytes += view.bytes

    def _owner(self, value: ir.Value) -> str:
        """The module of a weight: the module whose parameter its name is, or the module whose node reads it first."""
        path = normal_path(text_of(value.name).rpartition(".")[0])
        while path:
            if path in self._sums:
                return path
            path = path.rpartition(".")[0]
        return self._read_in.get(value, "")

    def _tree(self) -> ModuleView:
        inner: dict[str, list[ModuleView]] = {path: [] for path in self._sums}
        # The deepest first; sorting keeps the order of the first nodes.
        for path in sorted((path for path in self._sums if path), key=lambda path: -path.count(".")):
            inner[path.rpartition(".")[0]].append(_finished(path, self._sums[path], inner[path]))
        return _finished("", self._sums[""], inner[""])


def _finished(path: str, sums: _Sums, children: Sequence[ModuleView]) -> ModuleView:
    return ModuleView(
        path=path,
        classes=tuple(sums.classes),
        nodes=sums.nodes,
        total_nodes=sums.nodes + sum(child.total_nodes for child in children),
        parameters=sums.parameters,
        total_parameters=sums.parameters + sum(child.total_parameters for child in children),
        bytes=sums.bytes,
        total_bytes=sums.bytes + sum(child.total_bytes for child in children),
        flops=sums.flops,
        total_flops=sums.flops + sum(child.total_flops for child in children),
        unestimated=sums.unestimated,
        total_unestimated=sums.unestimated + sum(child.total_unestimated for child in children),
        children=tuple(children),
    )


def _labels(node: ir.Node, around: str, bodies: Sequence[ir.Graph]) -> list[str]:
    """The labels of a node's bodies, in their order."""
    own = text_of(node.name or node.op_type)
    names: list[str] = []
    for name, attribute in node.attributes.items():
        if attribute.type == ir.AttributeType.GRAPH:
            names.append(text_of(name))
        elif attribute.type == ir.AttributeType.GRAPHS:
            names += [f"{text_of(name)}[{position}]" for position in range(len(attribute.value))]
    if len(names) != len(bodies):  # graphs_of knows ai.onnx's operators with bodies only
        names = [f"body {position}" for position in range(len(bodies))]
    return [f"{around}/{own}/{name}" if around else f"{own}/{name}" for name in names]


_ABSENT = ValueView("", None, None)


def _dim(dim: int | ir.SymbolicDim) -> Dim:
    if isinstance(dim, int):
        return dim
    return None if dim.value is None else text_of(dim.value)
