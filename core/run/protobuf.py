"""A model as ONNX's protocol buffer: what ``onnx_ir`` makes of it, in a fraction of the time.

Most of the buffer's messages are types of values, and a few types are those of nearly all values: each is made once here
and copied. Everything else is ``onnx_ir``'s serialisation.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx_ir import serde

_LOGGER = logging.getLogger(__name__)
#: Where ``onnx_ir`` keeps the quantisation annotation of a value.
_ANNOTATION = "quant_parameter_tensor_names"


def to_proto(
    model: ir.Model,
    proto: onnx.ModelProto | None = None,
    *,
    tensors: Mapping[str, ir.TensorProtocol] | None = None,
    inputs: Sequence[ir.Value] | None = None,
) -> onnx.ModelProto:
    """The protocol buffer of a model.

    Args:
        model: The model; it is not changed.
        proto: The message to fill; a new one when ``None``.
        tensors: The contents of the initializers to be written, by name, instead of the model's own.
        inputs: The graph's inputs, instead of the model's own.

    Raises:
        onnx_ir.serde.SerdeError: A part of the model can't be written; a fake tensor for example.
    """
    graph = model.graph
    if inputs is None:
        inputs = graph.inputs
    if tensors is None:
        tensors = _contents(graph)
    frame = copy.copy(model)
    frame.graph = ir.GraphView(  # type: ignore[assignment]
        inputs,
        graph.outputs,
        nodes=(),
        doc_string=graph.doc_string,
        opset_imports=graph.opset_imports,
        name=graph.name,
        metadata_props=graph.metadata_props,
    )
    proto = serde.serialize_model_into(onnx.ModelProto() if proto is None else proto, frame)
    described = [value for name, value in graph.initializers.items() if name in tensors]
    for value in described:
        message = proto.graph.initializer.add()
        serde.serialize_tensor_into(message, tensors[str(value.name)])
        message.name = value.name
    for node in graph:
        serde.serialize_node_into(proto.graph.node.add(), node, model_ir_version=model.ir_version)
        described += node.outputs
    # The frame has these already.
    written = {id(value) for value in (*inputs, *graph.outputs)}
    _add_value_infos(proto.graph, [value for value in described if id(value) not in written])
    return proto


def _contents(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    found: dict[str, ir.TensorProtocol] = {}
    for name, value in graph.initializers.items():
        if value.const_value is None:
            _LOGGER.warning("the initializer %r has no content and is left out", name)
        else:
            found[name] = value.const_value
    return found


def _add_value_infos(proto: onnx.GraphProto, values: Iterable[ir.Value]) -> None:
    """Describes values inside of the graph: their types, shapes and annotations."""
    types: dict[tuple[ir.DataType, tuple[int | ir.SymbolicDim, ...] | None], onnx.TypeProto] = {}
    add = proto.value_info.add
    for value in values:
        annotation = value.meta.get(_ANNOTATION)
        if annotation:
            entry = proto.quantization_annotation.add(tensor_name=value.name)
            for key in sorted(annotation):
                entry.quant_parameter_tensor_names.add(key=key, value=annotation[key])
        kind, shape = value.type, value.shape
        noted = bool(value.metadata_props or value.doc_string)
        if not value.name or (kind is None and shape is None and not noted):
            continue
        if noted or not isinstance(kind, ir.TensorType) or kind.denotation or _has_denotations(shape):
            serde.serialize_value_into(add(), value)
            continue
        key = kind.dtype, None if shape is None else shape.dims
        found = types.get(key)
        info = add()
        info.name = value.name
        if found is not None:
            info.type.CopyFrom(found)
            continue
        serde.serialize_type_into(info.type, kind)
        if shape is not None:
            serde.serialize_shape_into(info.type, shape)
        types[key] = info.type


def _has_denotations(shape: ir.Shape | None) -> bool:
    return shape is not None and any(map(shape.get_denotation, range(len(shape))))
