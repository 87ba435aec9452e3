"""Attributes as converters write them, and as ONNX holds them; checks of nodes against their schemas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.dtypes import as_array, to_onnx_dtype
from onnxplug.build.spec import OpSpec
from onnxplug.errors import ConversionError

_INT = {int}
_KINDS = ir.AttributeType
_GRAPHS = frozenset({_KINDS.GRAPH, _KINDS.GRAPHS})
_MANY = {
    _KINDS.INTS: _KINDS.INT,
    _KINDS.FLOATS: _KINDS.FLOAT,
    _KINDS.STRINGS: _KINDS.STRING,
    _KINDS.TENSORS: _KINDS.TENSOR,
    _KINDS.GRAPHS: _KINDS.GRAPH,
    _KINDS.TYPE_PROTOS: _KINDS.TYPE_PROTO,
    _KINDS.SPARSE_TENSORS: _KINDS.SPARSE_TENSOR,
}


def make_attribute(spec: OpSpec, name: str, value: Any) -> ir.Attr:
    """An attribute of an operator: of the type in its schema, else of the type of the value.

    Args:
        spec: The operator.
        name: The attribute's name.
        value: A Python object, or an ``onnx_ir.Attr`` (of any name) for a type that Python can't tell, and for a
            reference to an attribute of the function around.

    Raises:
        ConversionError: The operator has no such attribute, or it holds no such value.
    """
    kind = spec.attributes.get(name)
    if kind is None and spec.has_schema:
        known = ", ".join(sorted(spec.attributes)) or "none"
        raise ConversionError(f"{spec.op_type} has no attribute {name!r} at version {spec.version}; it has {known}")
    if isinstance(value, ir.Attr):
        if kind is not None and value.type != kind:
            raise ConversionError(f"attribute {name!r} of {spec.op_type} is {kind.name}, got {value.type.name}")
        if value.name == name:
            return value
        if value.is_ref():
            return ir.RefAttr(name, str(value.ref_attr_name), value.type)
        return ir.Attr(name, value.type, value.value)
    if kind is None:
        kind = guess_type(name, value)
    try:
        return ir.Attr(name, kind, _attribute_value(kind, value))
    except (TypeError, ValueError) as error:
        raise ConversionError(
            f"attribute {name!r} of {spec.op_type} is {kind.name}, which can't hold {value!r}: {error}"
        ) from error


def _attribute_value(kind: ir.AttributeType, value: Any) -> Any:
    """The value as ``onnx_ir`` keeps it for an attribute type."""
    item_kind = _MANY.get(kind)
    if item_kind is not None:
        if not isinstance(value, list | tuple | np.ndarray | torch.Size):
            raise TypeError("expected a list")
        converted = [_attribute_value(item_kind, item) for item in value]
        if any(isinstance(item, bytes) for item in converted):
            raise ValueError("in a list each string must be UTF-8")
        return converted
    if kind == _KINDS.INT:
        return int(to_onnx_dtype(value)) if isinstance(value, torch.dtype) else _exact_int(value)
    if kind == _KINDS.FLOAT:
        return float(value)
    if kind == _KINDS.TENSOR:
        return value if isinstance(value, ir.TensorProtocol) else ir.tensor(as_array(value))
    if kind == _KINDS.STRING:
        return _text(value)
    if kind == _KINDS.GRAPH and not isinstance(value, ir.Graph):
        raise TypeError("expected a graph, which g.subgraph(...) makes")
    return value


def _exact_int(value: Any) -> int:
    if isinstance(value, float | np.floating) and not float(value).is_integer():
        raise ValueError("it is not an integer")
    return int(value)


def _text(value: Any) -> str | bytes:
    """Text; bytes that are not UTF-8 stay bytes, since a protobuf field holds either."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if not isinstance(value, str):
        raise TypeError("text is wanted")
    return value


def guess_type(name: str, value: Any) -> ir.AttributeType:
    """The type of an attribute of an operator without schema.

    Raises:
        ConversionError: An empty list, whose element type is unknown, or an object that ONNX can't hold.
    """
    many = isinstance(value, list | tuple | torch.Size)
    if many and not value:
        raise ConversionError(
            f"attribute {name!r} is an empty list, whose element type is unknown",
            hint=f"Give it as onnx_ir.AttrInt64s({name!r}, []) or another typed attribute.",
        )
    kinds = {_guess_one(item) for item in value} if many else {_guess_one(value)}
    if kinds == {_KINDS.INT, _KINDS.FLOAT}:
        kinds = {_KINDS.FLOAT}
    kind = kinds.pop()
    if kind is None or kinds:
        raise ConversionError(f"attribute {name!r} has a value that ONNX can't hold: {value!r}")
    if not many:
        return kind
    return next(list_kind for list_kind, single in _MANY.items() if single == kind)


def _guess_one(value: Any) -> ir.AttributeType | None:
    if isinstance(value, bool | int | np.bool_ | np.integer | ir.DataType | torch.dtype):
        return _KINDS.INT
    if isinstance(value, float | np.floating):
        return _KINDS.FLOAT
    if isinstance(value, str | bytes):
        return _KINDS.STRING
    if isinstance(value, ir.Graph):
        return _KINDS.GRAPH
    if isinstance(value, torch.Tensor | np.ndarray | ir.TensorProtocol):
        return _KINDS.TENSOR
    return _KINDS.TYPE_PROTO if isinstance(value, ir.TypeAndShape) else None


class Attributes:
    """The attributes of a graph's nodes: nodes of an operator share equal numbers, texts and lists of integers.

    Args:
        describe: How a message calls a dynamic size.
    """

    def __init__(self, describe: Callable[[Any], str]) -> None:
        self._describe = describe
        self._shared: dict[Any, tuple[ir.Attr, Any]] = {}

    def of(self, spec: OpSpec, name: str, value: Any) -> tuple[ir.Attr, Any]:
        """An attribute of an operator, and a key that is equal for equal attributes.

        Raises:
            ConversionError: The value is a dynamic size, or none that the attribute can hold.
        """
        kind = type(value)
        key: Any = None
        if kind is int or kind is str:
            key = spec, name, kind, value
        elif kind is float:
            key = spec, name, kind, value, math.copysign(1.0, value)
        elif (kind is list or kind is tuple) and set(map(type, value)) <= _INT:
            key = spec, name, list, tuple(value)
        pair = self._shared.get(key) if key is not None else None
        if pair is None:
            if kind is ir.Value or (isinstance(value, list | tuple) and any(isinstance(v, ir.Value) for v in value)):
                raise ConversionError(
                    f"attribute {name!r} of {spec.op_type} must be a constant, but it is the dynamic size "
                    f"{self._describe(value)}",
                    hint="Make that dimension static, or use an operator that takes it as an input.",
                )
            attr = make_attribute(spec, name, value)
            pair = attr, attribute_key(attr)
            if key is not None:
                self._shared[key] = pair
        return pair


def attribute_key(attr: ir.Attr) -> Any:
    """Equal for equal values of an attribute; large tensors and graphs are compared by identity."""
    value = attr.value
    if attr.is_ref():
        return "reference", attr.ref_attr_name
    if attr.type == _KINDS.TENSOR:
        return (value.dtype, tuple(value.shape), value.tobytes()) if value.nbytes <= 4096 else id(value)
    if attr.type in _GRAPHS or attr.type == _KINDS.TENSORS:
        return id(value)
    if attr.type == _KINDS.FLOAT:
        return value, math.copysign(1.0, value)
    return value


def check_node(spec: OpSpec, values: Sequence[ir.Value | None], outputs: int) -> None:
    """Holds a node against its schema: number of inputs and outputs, and required inputs.

    Raises:
        ConversionError: It doesn't fit.
    """
    if not spec.min_inputs <= len(values) <= spec.max_inputs:
        most = spec.max_inputs if spec.max_inputs < 1 << 30 else "any number of"
        raise ConversionError(f"{spec.name} takes {spec.min_inputs} to {most} inputs, got {len(values)}")
    if not spec.min_outputs <= outputs <= spec.max_outputs:
        raise ConversionError(
            f"{spec.name} has {spec.min_outputs} to {spec.max_outputs} outputs, but {outputs} were requested"
        )
    if None in values:
        for position, value in enumerate(values):
            if value is None and spec.is_required(position):
                raise ConversionError(f"{spec.name} needs its input {position}, which is None")


def check_dtypes(spec: OpSpec, values: Sequence[ir.Value | None], is_stored: Callable[[ir.Value], bool]) -> None:
    """Holds the dtypes of a node's inputs against the type constraints of its schema; each combination once.

    Args:
        spec: The operator.
        values: The inputs.
        is_stored: Whether the model stores a value: nodes of ai.onnx on stored values alone are computed at export, whatever the
            schema says.

    Raises:
        ConversionError: They don't fit.
    """
    dtypes = tuple(
        [value.dtype if value is not None and type(value.type) is ir.TensorType else None for value in values]
    )
    if dtypes in spec.fitting:
        return
    groups: dict[str, tuple[int, ir.DataType]] = {}
    for position, dtype in enumerate(dtypes):
        if dtype is None:
            continue
        allowed = spec.input_types[min(position, len(spec.input_types) - 1)]
        if allowed and dtype not in allowed:
            if not spec.domain and all(value is None or is_stored(value) for value in values):
                return
            names = ", ".join(sorted(d.name.lower() for d in allowed))
            raise ConversionError(
                f"{spec.name} takes {names} as input {position}, got {dtype.name.lower()}: its schema says so"
            )
        group = spec.group_of(position)
        first, other = groups.setdefault(group, (position, dtype)) if group else (position, dtype)
        if other != dtype:
            raise ConversionError(
                f"{spec.name} takes one dtype as inputs {first} and {position} ({group}), got {other.name.lower()} and "
                f"{dtype.name.lower()}: its schema says so"
            )
    spec.fitting.add(dtypes)
