"""The attributes of a node that differ from the defaults of its operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir


def effective_attributes(node: ir.Node, opsets: Mapping[str, int]) -> dict[str, Any]:
    """The attributes of a node that differ from the defaults of its operator, as comparable values."""
    attributes: dict[str, Any] = {}
    defaults = _defaults(node, opsets)
    for name, attribute in node.attributes.items():
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue  # their nodes are compared
        value = _comparable(attribute)
        if name in defaults and defaults[name] == value:
            continue
        if not node.domain and _is_usual(node, name, value):
            continue
        attributes[name] = value
    return attributes


def default_of(attribute: ir.Attr | None) -> Any:
    """A function's attribute with its default as a comparable value; ``None`` where there is no such attribute."""
    if attribute is None:
        return None
    return attribute.type, None if attribute.value is None else _comparable(attribute)


def _is_usual(node: ir.Node, name: str, value: Any) -> bool:
    """Whether an attribute of a convolution or pool has the value that holds without the attribute."""
    if not isinstance(value, tuple):
        return False
    if name in ("strides", "dilations"):
        return all(item == 1 for item in value)
    if name in ("pads", "output_padding"):
        return all(item == 0 for item in value)
    if name == "kernel_shape" and node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 1:
        weight = node.inputs[1]
        shape = None if weight is None else weight.shape
        return shape is not None and tuple(shape)[2:] == value
    return False


def _comparable(attribute: ir.Attr) -> Any:
    if attribute.is_ref():
        return ("reference", attribute.ref_attr_name)
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        if isinstance(value, ir.ExternalTensor):
            return ("external", str(value.location), value.offset, value.length)
        return (value.dtype, tuple(value.shape), np.asarray(value.numpy()).tobytes())
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return tuple(_number(item) if isinstance(item, float) else item for item in value)
    if isinstance(value, str | int | bytes):
        return value
    return repr(value)


def _number(value: float) -> Any:
    """A number as a file has it; NaN is equal to NaN."""
    return float(np.float32(value)) if value == value else "NaN"


_schemas: dict[tuple[str, str, int], dict[str, Any]] = {}


def _defaults(node: ir.Node, opsets: Mapping[str, int]) -> dict[str, Any]:
    """The defaults of an operator's attributes, as ONNX's schema has them."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = node.version or opsets.get(domain, 0)
    key = (domain, node.op_type, version)
    if key not in _schemas:
        _schemas[key] = {}
        if onnx.defs.has(node.op_type, domain=domain, max_inclusive_version=version):
            schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=version, domain=domain)
            for name, described in schema.attributes.items():
                if described.default_value.name:
                    _schemas[key][name] = _comparable(ir.serde.deserialize_attribute(described.default_value))
    return _schemas[key]
