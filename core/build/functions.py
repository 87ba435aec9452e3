"""Model-local functions: bodies built with the same builder, closed over nothing.

An example, three calls of ``g.function("com.acme", "Softcap", build, [x, cap])`` with ``x`` of 2, 2 and 1 dimensions: the first
builds the body, for an input of 2 dimensions of any sizes; the second calls the same function; the third, whose signature differs,
builds ``Softcap_2``. ``cap`` has to be an input: a body that reads a value of the graph around it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.build.attributes import make_attribute
from onnxplug.build.opset import Emitter
from onnxplug.build.provenance import Provenances
from onnxplug.build.scope import Scopes, graphs_of, nodes_of, used_by
from onnxplug.build.sizes import Sizes
from onnxplug.build.spec import OpSpec
from onnxplug.errors import ConversionError
from onnxplug.text import counted


class Functions:
    """The model-local functions of a model.

    Args:
        g: The builder, through which bodies are emitted.
        scope, sizes, provenance: The builder's own.

    Attributes:
        defined: The functions so far, by domain, name and signature.
    """

    def __init__(self, g: Emitter, scope: Scopes, sizes: Sizes, provenance: Provenances) -> None:
        self.defined: dict[Any, ir.Function] = {}
        self._g = g
        self._scope = scope
        self._sizes = sizes
        self._provenance = provenance

    def call(
        self,
        domain: str,
        name: str,
        build: Callable[..., ir.Value | Sequence[ir.Value]],
        inputs: Sequence[Any],
        *,
        version: int | None,
        outputs: int,
        attributes: Mapping[str, Any] | None,
    ) -> Any:
        """Calls a function, defining it at first use (:meth:`GraphBuilder.function`)."""
        if not domain:
            raise ConversionError(f"the model-local function {name!r} needs a domain of its own, not ai.onnx's")
        actual = [v if v is None or isinstance(v, ir.Value) else self._g.const(v) for v in inputs]
        untyped = OpSpec(domain, name, 1, None)
        attrs = {k: make_attribute(untyped, k, v) for k, v in (attributes or {}).items() if v is not None}
        # Bodies are typed by their first call: another signature is another function.
        signature = (
            tuple(v and (v.dtype, len(v.shape) if v.shape is not None else None) for v in actual),
            tuple((k, a.type) for k, a in attrs.items()),
            outputs,
        )
        opset = self._g.domain(domain, version)
        key = (domain, name, signature)
        function = self.defined.get(key)
        if function is None:
            taken = sum(1 for d, n, _ in self.defined if (d, n) == (domain, name))
            own_name = f"{name}_{taken + 1}" if taken else name
            function = self.defined[key] = self.define(domain, own_name, build, actual, attrs)
        if len(function.outputs) != outputs:
            del self.defined[key]
            raise ConversionError(
                f"the function {name!r} returns {counted(len(function.outputs), 'value')}, but {outputs} were requested"
            )
        results = getattr(opset, function.name)(*actual, _outputs=outputs, **attrs)
        for result, formal in zip((results,) if outputs == 1 else results, function.outputs, strict=True):
            if result.dtype is None and formal.dtype is not None:
                result.type = ir.TensorType(formal.dtype)
            if result.shape is None and formal.shape is not None:
                result.shape = ir.Shape([None] * len(formal.shape))
        return results

    def define(
        self,
        domain: str,
        name: str,
        build: Callable[..., Any],
        actual: Sequence[ir.Value | None],
        attributes: Mapping[str, ir.Attr] | None = None,
    ) -> ir.Function:
        """Builds the body of a function for inputs of the dtypes and ranks of ``actual``."""
        formals = [
            ir.Value(
                name=f"x{index}",
                type=ir.TensorType(value.dtype) if value is not None and value.dtype is not None else None,
                shape=ir.Shape([None] * len(value.shape)) if value is not None and value.shape is not None else None,
            )
            for index, value in enumerate(actual)
        ]
        references = {k: ir.RefAttr(k, k, a.type) for k, a in (attributes or {}).items()}
        own = self._provenance
        provenance = own.current.in_function(name)
        with self._scope.nested(isolated=True), own.converting(own.call, provenance), self._sizes.isolated():
            inputs = [None if value is None else formal for value, formal in zip(actual, formals, strict=True)]
            outputs = self._scope.own_outputs(build(*inputs, **references))
            nodes = self._scope.live(outputs)
        constants = _constant_nodes(nodes)
        own.of.update(dict.fromkeys(constants, provenance))
        nodes = [*constants, *nodes]
        _refuse_captures(f"{domain}::{name}", formals, nodes)
        imports = {"": self._g.opset}
        graph = ir.Graph(formals, outputs, nodes=nodes, opset_imports=imports, name=name)
        # A node inside a branch or a loop counts too.
        imports = {node.domain: self._g.opsets[node.domain] for node in nodes_of(graph) if node.domain}
        graph.opset_imports.update(imports)
        declared = [ir.Attr(k, a.type, None) for k, a in (attributes or {}).items()]
        return ir.Function(domain, name, graph=graph, attributes=declared)


def _refuse_captures(name: str, formals: Sequence[ir.Value], nodes: Sequence[ir.Node]) -> None:
    """Refuses a body that reads values of the calling graph: a function sees only its inputs and its own nodes."""
    own = {id(v) for v in formals}
    pending = list(nodes)
    inside: list[ir.Node] = []
    while pending:
        node = pending.pop()
        inside.append(node)
        own.update(id(v) for v in node.outputs)
        for graph in graphs_of(node):
            own.update(id(v) for v in graph.inputs)
            pending.extend(graph)
    for node in inside:
        for value in node.inputs:
            if value is not None and id(value) not in own:
                raise ConversionError(
                    f"the body of the function {name} reads {value.name or 'a value'} of the graph around it in a "
                    f"{node.op_type}",
                    hint="Give it to the function as one of its inputs.",
                )


def _constant_nodes(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """A function has no initializers: each constant that its body reads becomes a Constant node of its own."""
    replacements: dict[int, ir.Value] = {}
    constants: list[ir.Node] = []
    for node in nodes:
        for value in used_by(node):
            if value.const_value is None or id(value) in replacements or value.producer() is not None:
                continue
            local = ir.Value(type=value.type, shape=value.shape)
            attr = ir.Attr("value", ir.AttributeType.TENSOR, value.const_value)
            constants.append(ir.Node("", "Constant", [], [attr], outputs=[local]))
            replacements[id(value)] = local
    for node in nodes:
        _replace(node, replacements)
    return constants


def _replace(node: ir.Node, replacements: Mapping[int, ir.Value]) -> None:
    """Reads the local constants instead, in the node's subgraphs too."""
    for index, read in enumerate(node.inputs):
        if read is not None and id(read) in replacements:
            node.replace_input_with(index, replacements[id(read)])
    for graph in graphs_of(node):
        for inner in graph:
            _replace(inner, replacements)
