"""Model-local functions: bodies built with the same builder, closed over nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxplug.build.scope import Scope, used_by

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder


def define_function(
    g: GraphBuilder, domain: str, name: str, build: Callable[..., Any], actual: Sequence[ir.Value]
) -> ir.Function:
    """Builds the body of a function for inputs of the dtypes and ranks of ``actual``."""
    formals = [
        ir.Value(
            name=f"x{index}",
            type=ir.TensorType(value.dtype) if value.dtype is not None else None,
            shape=ir.Shape([None] * len(value.shape)) if value.shape is not None else None,
        )
        for index, value in enumerate(actual)
    ]
    outer, g._scope = g._scope, Scope(g._scope, isolated=True)
    metadata, g.metadata = g.metadata, None
    symbols = g.hide_symbols()
    try:
        results = build(*formals)
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
    imports = {"": g.opset, **{node.domain: g.opsets[node.domain] for node in nodes if node.domain}}
    graph = ir.Graph(formals, outputs, nodes=nodes, opset_imports=imports, name=name)
    return ir.Function(domain, name, graph=graph, attributes=())


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
        for index, read in enumerate(node.inputs):
            if read is not None and id(read) in made:
                node.replace_input_with(index, made[id(read)])
    return constants
