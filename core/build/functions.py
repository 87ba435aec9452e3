"""Model-local functions: bodies built with the same builder, closed over nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxplug.build.attributes import make_attribute
from onnxplug.build.scope import Scope, graphs_of, used_by
from onnxplug.build.spec import OpSpec
from onnxplug.errors import ConversionError

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder


def call_function(
    g: GraphBuilder,
    domain: str,
    name: str,
    build: Callable[..., Any],
    inputs: Sequence[Any],
    version: int | None,
    outputs: int,
    attributes: Mapping[str, Any],
) -> Any:
    """What :meth:`GraphBuilder.function` does."""
    if not domain:
        raise ConversionError(f"the model-local function {name!r} needs a domain of its own, not ai.onnx's")
    actual = [v if v is None or isinstance(v, ir.Value) else g.const(v) for v in inputs]
    untyped = OpSpec(domain, name, 1, None)
    attrs = {k: make_attribute(untyped, k, v) for k, v in attributes.items() if v is not None}
    # Bodies are typed by their first call: another signature is another function.
    signature = (
        tuple(v and (v.dtype, len(v.shape) if v.shape is not None else None) for v in actual),
        tuple((k, a.type) for k, a in attrs.items()),
        outputs,
    )
    opset = g.domain(domain, version)
    key = (domain, name, signature)
    function = g.functions.get(key)
    if function is None:
        taken = sum(1 for d, n, _ in g.functions if (d, n) == (domain, name))
        own_name = f"{name}_{taken + 1}" if taken else name
        function = g.functions[key] = define_function(g, domain, own_name, build, actual, attrs)
    if len(function.outputs) != outputs:
        del g.functions[key]
        raise ConversionError(f"the function {name!r} returns {len(function.outputs)} values, {outputs} are asked for")
    results = getattr(opset, function.name)(*actual, _outputs=outputs, **attrs)
    for result, formal in zip((results,) if outputs == 1 else results, function.outputs, strict=True):
        if result.dtype is None and formal.dtype is not None:
            result.type = ir.TensorType(formal.dtype)
        if result.shape is None and formal.shape is not None:
            result.shape = ir.Shape([None] * len(formal.shape))
    return results


def define_function(
    g: GraphBuilder,
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
    outer, g._scope = g._scope, Scope(g._scope, isolated=True)
    metadata, g.metadata = g.metadata, None
    symbols = g.hide_symbols()
    try:
        given = [None if value is None else formal for value, formal in zip(actual, formals, strict=True)]
        results = build(*given, **references)
        outputs = [results] if isinstance(results, ir.Value) else list(results)
        made = {id(v) for v in g._scope.values()}
        for position, value in enumerate(outputs):
            if id(value) not in made or any(value is o for o in outputs[:position]):
                outputs[position] = g._identity(value)
        nodes = g._scope.live_nodes(outputs)
    finally:
        g._scope = outer
        g.metadata = metadata
        g.restore_symbols(symbols)
    nodes = [*_constant_nodes(nodes), *nodes]
    _refuse_captures(f"{domain}::{name}", formals, nodes)
    imports = {"": g.opset}
    graph = ir.Graph(formals, outputs, nodes=nodes, opset_imports=imports, name=name)
    # A node inside a branch or a loop counts too.
    imports = {node.domain: g.opsets[node.domain] for node in graph.all_nodes() if node.domain}
    graph.opset_imports.update(imports)
    declared = [ir.Attr(k, a.type, None) for k, a in (attributes or {}).items()]
    return ir.Function(domain, name, graph=graph, attributes=declared)


def _refuse_captures(name: str, formals: Sequence[ir.Value], nodes: Sequence[ir.Node]) -> None:
    """A function sees its inputs and what it makes, nothing of the graph that calls it."""
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
    made: dict[int, ir.Value] = {}
    constants: list[ir.Node] = []
    for node in nodes:
        for value in used_by(node):
            if value.const_value is None or id(value) in made or value.producer() is not None:
                continue
            local = ir.Value(type=value.type, shape=value.shape)
            attr = ir.Attr("value", ir.AttributeType.TENSOR, value.const_value)
            constants.append(ir.Node("", "Constant", [], [attr], outputs=[local]))
            made[id(value)] = local
    for node in nodes:
        _replace(node, made)
    return constants


def _replace(node: ir.Node, made: Mapping[int, ir.Value]) -> None:
    """Reads the local constants instead, in the node's subgraphs too."""
    for index, read in enumerate(node.inputs):
        if read is not None and id(read) in made:
            node.replace_input_with(index, made[id(read)])
    for graph in graphs_of(node):
        for inner in graph:
            _replace(inner, made)
