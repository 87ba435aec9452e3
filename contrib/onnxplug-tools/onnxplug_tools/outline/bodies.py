"""The bodies of functions: copies of nodes that read the function's inputs and constants of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxplug.build.names import Names
from onnxplug.build.provenance import Provenance
from onnxplug.build.scope import graphs_of
from onnxplug_tools.outline.canonical import is_constant, read_by
from onnxplug_tools.outline.terms import in_terms_of, unnumbered, within

#: Where the constants of bodies come from.
_CONSTANT = Provenance("constant", "onnxplug")


class Body:
    """A function's body in the making.

    Args:
        path: The module's path in the model, with which names and metadata begin.
        types: Writes the type and shape of a value of the model to its copy.
        full: Whether its nodes have full or short metadata about their origin; ``None`` for none.
    """

    def __init__(self, path: str, types: Callable[[ir.Value, ir.Value], None], full: bool | None = False) -> None:
        self.path = path
        self.names = Names()
        self._node_names = Names()
        self._full = full
        self.nodes: list[ir.Node] = []
        self._types = types
        #: Each value of the model to its copy in the body.
        self.values: dict[ir.Value, ir.Value] = {}

    def add_input(self, value: ir.Value, name: str) -> ir.Value:
        """An input that stands for a value of the model."""
        return self._made(value, name)

    def copy(self, node: ir.Node) -> None:
        """Adds a copy of a node of the model."""
        for value in read_by(node):
            self.read(value)
        self.nodes.append(self._copied(node))

    def call(self, node: ir.Node, outputs: Iterable[ir.Value]) -> None:
        """Adds the call of another function; its results are named after the model's values that they stand for."""
        node.name = self._node_names.unique(str(node.name))
        for value, result in zip(outputs, node.outputs, strict=True):
            self._types(value, result)
            result.name = self._unnumbered(value)
            self.values[value] = result
        self.nodes.append(node)

    def read(self, value: ir.Value) -> ir.Value:
        """The copy of a value of the model; a small constant becomes a constant of the body's own."""
        known = self.values.get(value)
        if known is None:
            assert is_constant(value), value
            known = self._made(value, "constant")
            attr = ir.Attr("value", ir.AttributeType.TENSOR, _unnamed(value))
            node = ir.Node("", "Constant", (), (attr,), outputs=(known,), name=self._node_names.unique("Constant"))
            if self._full is not None:
                node.metadata_props.update(_CONSTANT.metadata(self._full))
            self.nodes.append(node)
        return known

    def _made(self, value: ir.Value, name: str | None = None) -> ir.Value:
        copy = ir.Value(name=self._unnumbered(value) if name is None else self.names.unique(name))
        self._types(value, copy)
        self.values[value] = copy
        return copy

    def _unnumbered(self, value: ir.Value) -> str:
        return self.names.unique(unnumbered(value.name or "value"))

    def _copied(self, node: ir.Node) -> ir.Node:
        inputs = [None if value is None else self.values[value] for value in node.inputs]
        attributes = [self._attribute(attr) if graphs_of(node) else attr for attr in node.attributes.values()]
        outputs = [self._made(value) for value in node.outputs]
        return ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes,
            overload=node.overload,
            version=node.version,
            outputs=outputs,
            name=self._node_name(node),
            doc_string=node.doc_string,
            metadata_props=in_terms_of(self.path, node.metadata_props),
        )

    def _node_name(self, node: ir.Node) -> str:
        """The node's name as seen from the module."""
        place = within((node.name or "").rpartition("/")[0].replace("/", "."), self.path).replace(".", "/")
        return self._node_names.unique(f"{place}/{node.op_type}" if place else node.op_type)

    def _attribute(self, attr: ir.Attr) -> ir.Attr:
        if attr.is_ref() or attr.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            return attr
        if attr.type == ir.AttributeType.GRAPH:
            return ir.Attr(attr.name, attr.type, self._graph(attr.as_graph()))
        return ir.Attr(attr.name, attr.type, [self._graph(graph) for graph in attr.as_graphs()])

    def _graph(self, graph: ir.Graph) -> ir.Graph:
        inputs = [self._made(value) for value in graph.inputs]
        nodes = [self._copied(node) for node in graph]
        outputs = [self.values[value] for value in graph.outputs]
        return ir.Graph(inputs, outputs, nodes=nodes, name=graph.name, doc_string=graph.doc_string)


def _unnamed(value: ir.Value) -> ir.TensorProtocol:
    """A constant's content without a name, which the node's result has."""
    content = value.const_value
    assert content is not None
    array = content.numpy()
    return ir.Tensor(array, dtype=content.dtype, shape=ir.Shape(array.shape))


def shared_types(instances: Sequence[Sequence[ir.Value]]) -> Callable[[ir.Value, ir.Value], None]:
    """A function that gives the copy of a value the dtype and the sizes that all instances of a function share.

    Args:
        instances: For each instance its values, in the same order.
    """
    known: Mapping[ir.Value, Sequence[ir.Value]] = {values[0]: values for values in zip(*instances, strict=True)}

    def write(value: ir.Value, copy: ir.Value) -> None:
        alike = known.get(value, (value,))
        if all(other.type == value.type for other in alike):
            copy.type = value.type
        shapes = [other.shape for other in alike]
        first = shapes[0]
        if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
            return
        copy.shape = ir.Shape([_shared(dims) for dims in zip(*(shape or () for shape in shapes), strict=True)])

    return write


def _shared(dims: Sequence[int | ir.SymbolicDim]) -> int | ir.SymbolicDim | None:
    first = dims[0]
    return first if all(dim == first for dim in dims) else None
