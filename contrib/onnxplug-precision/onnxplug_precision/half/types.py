"""The element types of a node's operands and results, by the schemas of onnx and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

FLOAT = ir.DataType.FLOAT
_ONLY_FLOAT = frozenset({FLOAT})
_BY_TEXT = {f"tensor({dtype.name.lower()})": dtype for dtype in ir.DataType if dtype.name != "UNDEFINED"}


@dataclass(frozen=True)
class Slot:
    """An operand or result of an operator.

    Attributes:
        group: The type parameter of the schema, or the type itself.
        allowed: The allowed element types of a tensor; empty where it can't be a tensor.
    """

    group: str
    allowed: frozenset[ir.DataType]


@dataclass(frozen=True)
class Signature:
    """The operands and results of an operator; a variadic operand or result is the last, which repeats."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def input(self, index: int) -> Slot:
        """The operand at a place."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def output(self, index: int) -> Slot:
        """The result at a place."""
        return self.outputs[min(index, len(self.outputs) - 1)]


@cache
def signature(domain: str, op_type: str, version: int) -> Signature | None:
    """The signature of an operator; ``None`` where neither onnx nor ONNX Runtime knows it."""
    domain = "" if domain == "ai.onnx" else domain
    try:
        return _read(onnx.defs.get_schema(op_type, version, domain))
    except onnx.defs.SchemaError:
        schemas = [s for s in _of_onnxruntime().get((domain, op_type), ()) if s.since_version <= version]
        return _read(max(schemas, key=lambda s: s.since_version)) if schemas else None


def _read(schema: Any) -> Signature:
    allowed = {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}

    def slot(formal: Any) -> Slot:
        text = getattr(formal, "type_str", None) or formal.typeStr
        types = [_BY_TEXT.get(name) for name in allowed.get(text, [text])]
        return Slot(text, frozenset(t for t in types if t is not None))

    return Signature(tuple(map(slot, schema.inputs)), tuple(map(slot, schema.outputs)))


@cache
def _of_onnxruntime() -> Mapping[tuple[str, str], list[Any]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas: dict[tuple[str, str], list[Any]] = {}
    for schema in state.get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), []).append(schema)
    return schemas


def version_of(node: ir.Node, imports: Mapping[str, int]) -> int:
    """The version of a node's domain."""
    return node.version or imports.get(node.domain, 1)


#: Operators with the attribute that names the type of the result.
TYPED_BY_ATTRIBUTE = {"Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "EyeLike": "dtype"}


def infer_dtypes(model: ir.Model) -> None:
    """Infers missing element types of a model's values from their nodes, in place.

    Functions that are called with operands of several types, or whose nodes have attributes of the call, are inlined.
    """
    if any(_is_generic(function) for function in model.functions.values()) or not _Inference(model).visit(model):
        InlinePass()(model)
        _Inference(model).visit(model)


def _is_generic(function: ir.Function) -> bool:
    return any(attribute.is_ref() for node in function.all_nodes() for attribute in node.attributes.values())


class _Inference:
    def __init__(self, model: ir.Model) -> None:
        self._functions = model.functions
        self._visited: set[Any] = set()

    def visit(self, model: ir.Model) -> bool:
        """Infers the types of all values; ``False`` where a function is called with operands of several types."""
        return self._graph(model.graph, model.opset_imports)

    def _graph(self, graph: Any, imports: Mapping[str, int]) -> bool:
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            if value.type is None and value.const_value is not None:
                value.type = ir.TensorType(value.const_value.dtype)
        return all(self._node(node, imports) for node in graph)

    def _node(self, node: ir.Node, imports: Mapping[str, int]) -> bool:
        inner = subgraphs_of(node)
        if not all(self._graph(graph, imports) for graph in inner):
            return False
        function = self._functions.get(node.op_identifier())
        if function is not None:
            return self._call(node, function, imports)
        if inner:
            results = _results_of(node, inner[0])
            for out, result in zip(node.outputs, results, strict=False):
                out.type = out.type if out.type is not None else result.type
        elif any(out.type is None and out.name for out in node.outputs):
            _infer(node, imports)
        return True

    def _call(self, node: ir.Node, function: ir.Function, imports: Mapping[str, int]) -> bool:
        for formal, value in zip(function.inputs, node.inputs, strict=False):
            if value is None:
                continue
            if formal.type is None:
                formal.type = value.type
            elif value.type is not None and formal.dtype != value.dtype:
                return False
        if function.identifier() not in self._visited:
            self._visited.add(function.identifier())
            if not self._graph(function, {**imports, **function.opset_imports}):
                return False
        for out, result in zip(node.outputs, function.outputs, strict=False):
            out.type = out.type if out.type is not None else result.type
        return True


def all_nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes of a model, its functions and all subgraphs."""
    tops: list[ir.Graph | ir.Function] = [*model.functions.values(), model.graph]
    return [node for top in tops for node in top.all_nodes()]


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs in a node's attributes."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    return graphs


def _results_of(node: ir.Node, body: ir.Graph) -> list[ir.Value]:
    """The outputs of a subgraph whose types are the types of a node's results."""
    return list(body.outputs)[1:] if node.op_type == "Loop" else list(body.outputs)


def _infer(node: ir.Node, imports: Mapping[str, int]) -> None:
    signature_of_node = signature(node.domain, node.op_type, version_of(node, imports))
    if node.op_type == "Constant" and not node.domain:
        tensor = constant_of(node)
        if tensor is not None:
            node.outputs[0].type = ir.TensorType(tensor.dtype)
        return
    if node.op_type == "ConstantOfShape" and not node.domain:
        value = node.attributes.get("value")
        node.outputs[0].type = ir.TensorType(value.as_tensor().dtype if value is not None else FLOAT)
        return
    for index, out in enumerate(node.outputs):
        dtype = _result_dtype(node, signature_of_node, index) if signature_of_node is not None else None
        if out.type is None and dtype is not None:
            out.type = ir.TensorType(dtype)


def _result_dtype(node: ir.Node, signature_of_node: Signature, index: int) -> ir.DataType | None:
    attribute = None if node.domain else node.attributes.get(TYPED_BY_ATTRIBUTE.get(node.op_type, ""))
    if attribute is not None:
        return ir.DataType(attribute.as_int())
    if node.op_type in ("RandomNormal", "RandomUniform"):
        return FLOAT
    slot = signature_of_node.output(index)
    if len(slot.allowed) == 1:
        return next(iter(slot.allowed))
    for position, value in enumerate(node.inputs):
        if value is not None and value.dtype is not None and signature_of_node.input(position).group == slot.group:
            return value.dtype
    return None


def all_graphs(model: ir.Model) -> list[tuple[Any, Mapping[str, int]]]:
    """The graph of a model, its functions and all subgraphs, each with its opset imports; functions first."""
    graphs: list[tuple[Any, Mapping[str, int]]] = []
    tops: list[ir.Graph | ir.Function] = [*model.functions.values(), model.graph]
    for top in tops:
        imports = {**model.opset_imports, **top.opset_imports}
        graphs.append((top, imports))
        graphs += [(graph, imports) for graph in top.subgraphs()]
    return graphs


def constant_of(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor of a node ``Constant``; ``None`` for text and for a sparse tensor."""
    import numpy as np

    for name, attribute in node.attributes.items():
        if name == "value" and not attribute.is_ref():
            return attribute.as_tensor()
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.array(attribute.value, dtype=np.float32))
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.array(attribute.value, dtype=np.int64))
    return None
