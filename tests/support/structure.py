"""Models compared node for node, whatever their values are called and in whatever order their nodes stand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import AttributeProto, numpy_helper


def structure(model: onnx.ModelProto, *, by_name: int = 65) -> tuple[Counter[Any], list[Any]]:
    """A description of a model's nodes and outputs, equal for models that differ in names alone.

    Constants stand for their content, be they nodes or initializers; initializers of ``by_name`` elements or more stand
    for their names, as the graph's inputs do.

    Returns:
        How often each node is in the graph, and the outputs.
    """
    return _Structure(by_name).of(model.graph, {})


class _Structure:
    def __init__(self, by_name: int) -> None:
        self.by_name = by_name

    def of(self, graph: onnx.GraphProto, around: dict[str, Any]) -> tuple[Counter[Any], list[Any]]:
        values = dict(around)
        for position, value in enumerate(graph.input):
            values[value.name] = ("formal", position) if around else ("input", value.name)
        for tensor in graph.initializer:
            content = numpy_helper.to_array(tensor)
            values[tensor.name] = _content(content) if content.size < self.by_name else ("weight", tensor.name)
        nodes: Counter[Any] = Counter()
        for node in graph.node:
            if node.op_type == "Constant" and not node.domain:
                values[node.output[0]] = _content(numpy_helper.to_array(node.attribute[0].t))
                continue
            read = tuple(values[name] if name else None for name in node.input)
            attributes = tuple(
                (a.name, self._attribute(a, values)) for a in sorted(node.attribute, key=lambda a: a.name)
            )
            digest = hash((node.domain, node.op_type, read, attributes, len(node.output)))
            nodes[(node.domain, node.op_type, digest)] += 1
            for position, name in enumerate(node.output):
                values[name] = ("result", node.op_type, digest, position)
        return nodes, [(value.name if not around else "", values[value.name]) for value in graph.output]

    def _attribute(self, attribute: Any, values: dict[str, Any]) -> Any:
        if attribute.type == AttributeProto.GRAPH:
            nodes, outputs = self.of(attribute.g, values)
            return frozenset(nodes.items()), tuple(outputs)
        if attribute.type == AttributeProto.TENSOR:
            return _content(numpy_helper.to_array(attribute.t))
        return attribute.SerializeToString(deterministic=True)


def _content(array: Any) -> Any:
    return "constant", str(array.dtype), array.shape, array.tobytes()


def same_inlined(model: ir.Model, plain: ir.Model) -> None:
    """Compares a model with functions, inlined, with the plain model: node for node, and by inputs and outputs."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert structure(onnx.inliner.inline_local_functions(proto)) == structure(
        onnx.inliner.inline_local_functions(ir.to_proto(plain))
    )
    assert list(proto.graph.input) == list(ir.to_proto(plain).graph.input)
    assert list(proto.graph.output) == list(ir.to_proto(plain).graph.output)
