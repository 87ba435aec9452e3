"""Reads a model, in any of its usual forms, into a protocol buffer."""

from __future__ import annotations

import os
from typing import Any

import onnx
import onnx_ir as ir
from onnxplug_tools.onnx_file import parse_model, read_model

from onnxplug.errors import UsageError

Proto = onnx.ModelProto | onnx.GraphProto | onnx.FunctionProto | onnx.NodeProto


def load_proto(model: Any) -> Proto:
    """The protocol buffer of a model, with its external weights where it is a file.

    Args:
        model: A path, the serialised model, a protocol buffer (of a model, graph, function or node), an
            ``onnx_ir.Model``, or an ``OnnxProgram``.
    """
    if isinstance(model, Proto):
        return model
    if isinstance(model, ir.Model):
        return ir.serde.serialize_model(model)
    if isinstance(model, str | os.PathLike | bytes):
        return parse_model(model) if isinstance(model, bytes) else read_model(model, external=True)
    proto = getattr(model, "model_proto", None)  # torch.onnx.ONNXProgram, onnx.model_container.ModelContainer
    if isinstance(proto, onnx.ModelProto):
        container = getattr(model, "is_in_memory_external_initializer", None)
        return _with_tensors(model, proto) if container is not None else proto
    raise UsageError(
        f"an object of type {type(model).__name__} is not an ONNX model",
        hint="Give a path, the serialised model, a ModelProto, an onnx_ir.Model or an OnnxProgram.",
    )


def _with_tensors(container: Any, proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model with large tensors outside of its protocol buffer, as a single protocol buffer."""
    copied = onnx.ModelProto()
    copied.CopyFrom(proto)
    for tensor in copied.graph.initializer:
        if onnx.external_data_helper.uses_external_data(tensor):
            location = onnx.external_data_helper.ExternalDataInfo(tensor).location
            if container.is_in_memory_external_initializer(location):
                tensor.CopyFrom(onnx.numpy_helper.from_array(container[location], tensor.name))
    return copied


def opset_versions(proto: Proto) -> dict[str, int]:
    """The version of each domain that a protocol buffer imports; a single node has the newest version.

    Raises:
        UsageError: A GraphProto imports no versions.
    """
    if isinstance(proto, onnx.ModelProto | onnx.FunctionProto):
        return {
            imported.domain if imported.domain != "ai.onnx" else "": imported.version for imported in proto.opset_import
        }
    if isinstance(proto, onnx.NodeProto):
        return {proto.domain: 1, "": onnx.defs.onnx_opset_version()}
    raise UsageError(
        "a GraphProto does not say which opsets its operators are of", hint="Give opsets={'': 21}, or the whole model."
    )
