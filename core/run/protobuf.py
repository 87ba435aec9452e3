"""A model as ONNX's protocol buffer: what ``onnx_ir`` makes of it, in a fraction of the time.

Most of the buffer's messages are types of values, and a few types are those of nearly all values: each is made once here
and copied. Everything else is ``onnx_ir``'s serialisation.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch
from onnx_ir import serde

from onnxplug import logs
from onnxplug.build.stored import WeightTensor

_LOGGER = logs.logger("save")
#: Where ``onnx_ir`` keeps the quantisation annotation of a value.
_ANNOTATION = "quant_parameter_tensor_names"
#: The metadata of a value, ``None`` where it has none: ``meta`` makes an empty store of it, which takes longer than all else.
_metadata = getattr(ir.Value, "_metadata", ir.Value.meta).__get__


def to_proto(
    model: ir.Model,
    proto: onnx.ModelProto | None = None,
    *,
    tensors: Mapping[str, ir.TensorProtocol] | None = None,
    inputs: Sequence[ir.Value] | None = None,
    apart: Collection[str] = (),
) -> onnx.ModelProto:
    """The protocol buffer of a model.

    Args:
        model: The model; it is not changed.
        proto: The message to fill; a new one when ``None``.
        tensors: The contents of the initializers to be written, by name, instead of the model's own.
        inputs: The graph's inputs, instead of the model's own.
        apart: Names of initializers that the caller writes himself: they are described, and left out.

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
    skipped = set(apart)
    _add_initializers(proto.graph, {str(v.name): tensors[str(v.name)] for v in described if v.name not in skipped})
    attributes: dict[int, onnx.AttributeProto] = {}
    for node in graph:
        if node.overload or node.doc_string or node.device_configurations:
            serde.serialize_node_into(proto.graph.node.add(), node, model_ir_version=model.ir_version)
        else:
            _add_node(proto.graph, node, attributes)
        described += node.outputs
    # The frame has these already.
    written = {id(value) for value in (*inputs, *graph.outputs)}
    _add_value_infos(proto.graph, [value for value in described if id(value) not in written])
    return proto


def _add_initializers(proto: onnx.GraphProto, tensors: Mapping[str, ir.TensorProtocol]) -> None:
    """Adds the initializers, and then their contents, from the largest to the smallest.

    A tensor's bytes are copied on their way into the message; in this order they fit where those of the tensor before were, and
    the process asks the system for that memory once.
    """
    messages = [(proto.initializer.add(name=name), tensor) for name, tensor in tensors.items()]
    for message, tensor in sorted(messages, key=lambda entry: -entry[1].nbytes):
        _fill_initializer(message, tensor)


def _fill_initializer(message: onnx.TensorProto, tensor: ir.TensorProtocol) -> None:
    if isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()
    if (
        type(tensor) is WeightTensor
        and type(tensor.raw) is torch.Tensor
        and not (tensor.doc_string or tensor.metadata_props)
    ):
        message.data_type = tensor.dtype.value
        message.dims.extend(tensor.shape.dims)
        message.raw_data = tensor.tobytes()
    else:
        name = message.name
        serde.serialize_tensor_into(message, tensor)
        message.name = name


def _add_node(proto: onnx.GraphProto, node: ir.Node, attributes: dict[int, onnx.AttributeProto]) -> None:
    """Adds a node that has nothing but inputs, outputs, attributes, a name and metadata.

    Args:
        proto: The graph.
        node: The node.
        attributes: The messages of the attributes so far, by their ids: nodes share their attributes.
    """
    message = proto.node.add()
    message.op_type = node.op_type
    if node.domain:
        message.domain = node.domain
    if node.name:
        message.name = node.name
    message.input.extend(["" if value is None else value.name for value in node.inputs])
    names = [value.name for value in node.outputs]
    while names and not names[-1]:
        names.pop()
    message.output.extend(names)
    for attr in node.attributes.values():
        found = attributes.get(id(attr))
        if found is None:
            found = message.attribute.add()
            if attr.is_ref():
                serde.serialize_reference_attribute_into(found, attr)
            else:
                serde.serialize_attribute_into(found, attr)
            attributes[id(attr)] = found
        else:
            message.attribute.append(found)
    metadata = node.metadata_props
    if metadata:
        _add_metadata(message, metadata)


def _add_metadata(message: onnx.NodeProto | onnx.ValueInfoProto, metadata: Mapping[str, str]) -> None:
    add = message.metadata_props.add
    for key in sorted(metadata):
        entry = add()  # setting its fields takes less time than giving them here
        entry.key = key
        entry.value = metadata[key]


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
    types = _Types()
    add = proto.value_info.add
    for value in values:
        if _metadata(value) and value.meta.get(_ANNOTATION):
            _annotate(proto, value)
        kind, shape = value.type, value.shape
        metadata = value.metadata_props
        noted = bool(metadata or value.doc_string)
        if not value.name or (kind is None and shape is None and not noted):
            continue
        known = None if value.doc_string else types.of(kind, shape)
        if known is None:
            serde.serialize_value_into(add(), value)
            continue
        info = add()
        info.name = value.name
        info.type.CopyFrom(known)
        if metadata:
            _add_metadata(info, metadata)


def _annotate(proto: onnx.GraphProto, value: ir.Value) -> None:
    annotation = value.meta[_ANNOTATION]
    entry = proto.quantization_annotation.add(tensor_name=value.name)
    for key in sorted(annotation):
        entry.quant_parameter_tensor_names.add(key=key, value=annotation[key])


class _Types:
    """The messages of the types and shapes that were asked for; values mostly share their shape."""

    def __init__(self) -> None:
        self._by_objects: dict[tuple[ir.DataType, int], onnx.TypeProto] = {}
        self._by_content: dict[tuple[ir.DataType, tuple[int | ir.SymbolicDim, ...] | None], onnx.TypeProto] = {}

    def of(self, kind: ir.TypeProtocol | None, shape: ir.Shape | None) -> onnx.TypeProto | None:
        """The message of a tensor type and a shape without denotations; ``None`` of any other."""
        if type(kind) is not ir.TensorType or kind.denotation:
            return None
        objects = kind.dtype, id(shape)
        found = self._by_objects.get(objects)
        if found is None:
            if shape is not None and any(map(shape.get_denotation, range(len(shape)))):
                return None
            content = kind.dtype, None if shape is None else shape.dims
            found = self._by_content.get(content)
            if found is None:
                found = self._by_content[content] = onnx.TypeProto()
                serde.serialize_type_into(found, kind)
                if shape is not None:
                    serde.serialize_shape_into(found, shape)
            self._by_objects[objects] = found
        return found
