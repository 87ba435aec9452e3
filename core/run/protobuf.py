"""A model as ONNX's protocol buffer: ``onnx_ir``'s serialisation, without a second copy of the weights.

Most messages of a buffer are types of values, and nearly all values share a few types: each type is made once here.
Initializers are described by their tensors alone: quantisers that transpose a weight leave its description as it was, and
ONNX's shape inference then fails. Everything else is ``onnx_ir``'s serialisation.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx_ir import serde

from onnxplug import logs
from onnxplug.build.stored import WeightTensor
from onnxplug.errors import SaveError, WeightsError

_LOGGER = logs.logger("save")
# A string attribute that holds bytes (a model within an operator) is intended by its converter.
logging.getLogger(serde.__name__).addFilter(lambda record: "is instead bytes" not in str(record.msg))
#: Tensors of at least so many bytes are written after the rest of a model's graph, one by one.
_APART_BYTES = 1 << 20
#: The largest protocol buffer.
_LIMIT = 2**31 - 1
#: Fields of ONNX's messages, with the wire type of length-delimited content.
_GRAPH, _INITIALIZER, _RAW_DATA = (field << 3 | 2 for field in (7, 5, 9))
#: The metadata of a value, ``None`` where it has none: ``meta`` would create an empty store, which takes longer than all else.
_metadata = getattr(ir.Value, "_metadata", ir.Value.meta).__get__


def to_proto(
    model: ir.Model,
    *,
    tensors: Mapping[str, ir.TensorProtocol] | None = None,
    inputs: Sequence[ir.Value] | None = None,
    apart: Collection[str] = (),
) -> onnx.ModelProto:
    """The protocol buffer of a model.

    Args:
        model: The model; it is not changed.
        tensors: The contents of the initializers to be written, by name, instead of the model's own.
        inputs: The graph's inputs, instead of the model's own.
        apart: Names of initializers that the caller writes itself: they are described, and left out.

    Raises:
        onnx_ir.serde.SerdeError: A part of the model can't be written; a fake tensor for example.
    """
    graph = model.graph
    inputs = graph.inputs if inputs is None else inputs
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
    proto = serde.serialize_model(frame)
    described: list[ir.Value] = []
    weights: list[ir.Value] = []
    messages = []
    for name, value in graph.initializers.items():
        tensor = value.const_value if tensors is None else tensors.get(name)
        if tensor is not None:
            weights.append(value)
            if name not in apart:
                messages.append((proto.graph.initializer.add(name=name), tensor))
        elif tensors is None:
            _LOGGER.warning("the initializer %r has no content and is left out", name)
    # A tensor's bytes are copied on their way into the message: from the largest to the smallest, each fits into the memory of the
    # tensor before, and the process asks the system for that memory once.
    for message, tensor in sorted(messages, key=lambda entry: -entry[1].nbytes):
        _fill(message, tensor)
    for node in graph:
        serde.serialize_node_into(proto.graph.node.add(), node, model_ir_version=model.ir_version)
        described += node.outputs
    framed = {id(value) for value in (*inputs, *graph.outputs)}
    _describe(proto.graph, (value for value in described if id(value) not in framed))
    _note(proto.graph, (value for value in weights if id(value) not in framed))
    return proto


def _fill(message: onnx.TensorProto, tensor: ir.TensorProtocol) -> None:
    if isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()
    name = message.name  # the tensor's own name is that of its content elsewhere
    serde.serialize_tensor_into(message, tensor)
    message.name = name


def _note(proto: onnx.GraphProto, weights: Iterable[ir.Value]) -> None:
    """Writes annotations and metadata of initializers, without types and shapes."""
    for value in weights:
        _annotate(proto, value)
        if value.metadata_props or value.doc_string:
            info = proto.value_info.add()
            serde.serialize_value_into(info, value)
            info.ClearField("type")


def _annotate(proto: onnx.GraphProto, value: ir.Value) -> None:
    if _metadata(value) and (annotation := value.meta.get("quant_parameter_tensor_names")):
        entry = proto.quantization_annotation.add(tensor_name=value.name)
        for key in sorted(annotation):
            entry.quant_parameter_tensor_names.add(key=key, value=annotation[key])


def _describe(proto: onnx.GraphProto, values: Iterable[ir.Value]) -> None:
    """Describes values inside of a graph: their types, shapes, metadata and annotations."""
    types: dict[tuple[ir.DataType, int], onnx.TypeProto] = {}  # by the shape's id: most values share theirs
    for value in values:
        _annotate(proto, value)
        kind, shape, name = value.type, value.shape, value.name
        noted = value.metadata_props or value.doc_string
        if not name or (kind is None and shape is None and not noted):
            continue
        if type(kind) is not ir.TensorType or kind.denotation or noted:
            serde.serialize_value_into(proto.value_info.add(), value)
            continue
        known = types.get((kind.dtype, id(shape)))
        if known is not None:
            proto.value_info.add(name=name, type=known)
        else:
            info = proto.value_info.add()
            serde.serialize_value_into(info, value)
            types[kind.dtype, id(shape)] = info.type


def content(tensor: ir.TensorProtocol) -> Any:
    """The bytes of a tensor as ONNX stores them; a view of its memory where it has the same layout.

    Raises:
        WeightsError: The tensor has no numbers, can't be read from its file, or has another size than declared.
    """
    expected, name = tensor.nbytes, tensor.name
    if isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()
    stored: Any
    if isinstance(tensor, WeightTensor):
        stored = tensor.content()
    elif tensor.dtype.bitwidth < 8 or sys.byteorder == "big":
        stored = tensor.tobytes()
    else:
        stored = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
    if len(stored) != expected:
        raise WeightsError(f"the weight {name!r} has {len(stored)} bytes, not {expected}", names=[str(name)])
    return stored


def pieces(
    model: ir.Model,
    weights: Mapping[str, ir.TensorProtocol],
    inputs: Sequence[ir.Value],
    places: Mapping[str, tuple[str, int, int]] | None = None,
) -> Iterator[Any]:
    """A model's protocol buffer, piece by piece: at most one large tensor is in memory.

    Args:
        model: The model.
        weights: The initializers' tensors by name.
        inputs: The graph's inputs.
        places: Weights that are in other files: their names to the file's, the offset and the length.

    Raises:
        SaveError: It is larger than protocol buffers can be.
        WeightsError: A weight has no content.
    """
    tensors: dict[str, ir.TensorProtocol] = {}
    apart: dict[str, ir.TensorProtocol] = {}
    for name, tensor in weights.items():
        place = (places or {}).get(name)
        if place is not None:
            tensor = ir.ExternalTensor(*place, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)
        elif tensor.dtype != ir.DataType.STRING and tensor.nbytes >= _APART_BYTES:
            if not (tensor.doc_string or tensor.metadata_props):
                apart[name] = tensor
        elif isinstance(tensor, ir.ExternalTensor):  # its location is relative to the file that it was read from
            tensor = ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape, name=name)
        tensors[name] = tensor
    try:
        proto = to_proto(model, tensors=tensors, inputs=inputs, apart=apart)
        graph = proto.graph.SerializeToString()
        heads = [_head(name, tensor) for name, tensor in apart.items()]
        size = len(graph) + sum(map(len, heads)) + sum(tensor.nbytes for tensor in apart.values())
        if size > _LIMIT:
            raise SaveError(
                f"the model has {size / 1e9:.1f} GB, and a protocol buffer at most 2",
                hint="Its weights go into a file beside it: external_data=True.",
            )
        proto.ClearField("graph")
        rest = proto.SerializeToString()
    except WeightsError:
        raise
    except (serde.SerdeError, EncodeError, ValueError) as error:
        if isinstance(error.__cause__, WeightsError):  # of a tensor, which onnx_ir wraps
            raise error.__cause__ from None
        raise SaveError(f"the model can't be written as a protocol buffer: {error}") from error
    yield rest + bytes((_GRAPH,)) + _varint(size)
    yield graph
    for head, tensor in zip(heads, apart.values(), strict=True):
        yield head
        yield content(tensor)


def _head(name: str, tensor: ir.TensorProtocol) -> bytes:
    """The bytes before an initializer's content in the graph's protocol buffer."""
    message = onnx.TensorProto(name=name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
    head = message.SerializeToString() + bytes((_RAW_DATA,)) + _varint(tensor.nbytes)
    return bytes((_INITIALIZER,)) + _varint(len(head) + tensor.nbytes) + head


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes((*digits, number))
