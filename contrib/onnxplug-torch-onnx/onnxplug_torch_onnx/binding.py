"""A node's arguments bound to the parameters of a function that was written for torch.onnx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.errors import ConversionError

_MISSING: Any = object()


@dataclass(frozen=True)
class Parameter:
    """A parameter of an onnxscript function, a FunctionProto or a plain function.

    Attributes:
        attribute: Type of the attribute; ``None`` for an input.
        dtypes: Element types that it takes as an input; empty for any.
        group: Type variable shared with other inputs.
        keyword: Whether it is keyword-only.
    """

    name: str
    attribute: ir.AttributeType | None = None
    required: bool = True
    dtypes: frozenset[ir.DataType] = frozenset()
    group: str = ""
    keyword: bool = False


def parameters_of(signature: Any) -> list[Parameter]:
    """The parameters of an ``onnx_ir.schemas.OpSignature``."""
    parameters = []
    for item in signature.params:
        if item.is_attribute():
            parameters.append(Parameter(item.name, item.type, item.required))
            continue
        types = item.type_constraint.allowed_types
        dtypes = frozenset(t.dtype for t in types)
        every = len(dtypes) >= len(ir.DataType) - 1
        parameters.append(
            Parameter(item.name, None, item.required, frozenset() if every else dtypes, item.type_constraint.name)
        )
    return parameters


def bind(node: Any, parameters: Sequence[Parameter], what: str) -> dict[str, Any]:
    """The argument of each parameter: the operator's positional arguments in order, its keyword-only ones by name.

    Arguments that the call left at their defaults, and that the function does not need, are left to the function's own
    defaults; keyword arguments that it does not take (``device``, ``layout``) are dropped.

    Args:
        what: The function in words, for errors.

    Raises:
        ConversionError: The function has no parameter for an argument, or needs an argument that the operator lacks.
    """
    schema = getattr(node.target, "_schema", None)
    formals = list(schema.arguments) if schema is not None else []
    bound: dict[str, Any] = {}
    free = [p for p in parameters if not p.keyword]
    names = {p.name for p in parameters}
    for position, value in enumerate(node.args):
        formal = formals[position] if position < len(formals) else None
        is_passed = position < len(node.fx.args) or (formal is not None and formal.name in node.fx.kwargs)
        if formal is not None and formal.kwarg_only:
            name = formal.name if formal.name in names else None
        elif position < len(free):
            name = free[position].name
        else:
            name = formal.name if formal is not None and formal.name in names else None
        if name is None:
            if is_passed and value is not None and (formal is None or not formal.kwarg_only):
                raise ConversionError(f"{what} has no parameter for the argument {position} of {node.op_name}")
            continue
        parameter = next(p for p in parameters if p.name == name)
        if is_passed or parameter.required:
            bound[name] = _plain(value, parameter)
    missing = [p.name for p in parameters if p.required and p.name not in bound]
    if missing:
        raise ConversionError(f"{what} needs {', '.join(missing)}, which {node.op_name} does not have")
    return bound


def _plain(value: Any, parameter: Parameter) -> Any:
    """An argument as torch.onnx passes it: dtypes are ONNX's numbers, devices and layouts text."""
    from onnxplug.build.dtypes import to_onnx_dtype

    if isinstance(value, torch.dtype):
        return int(to_onnx_dtype(value))
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return str(value)
    if parameter.attribute == ir.AttributeType.FLOAT and isinstance(value, int):
        return float(value)
    if parameter.attribute == ir.AttributeType.INT and isinstance(value, bool):
        return value
    return value


def mismatch(parameters: Sequence[Parameter], bound: dict[str, Any]) -> str | None:
    """Why arguments don't fit the parameters' types; ``None`` when they do. Numbers as inputs fit every dtype."""
    groups: dict[str, ir.DataType] = {}
    for parameter in parameters:
        value = bound.get(parameter.name)
        items = value if isinstance(value, list | tuple) else [value]
        if parameter.attribute is not None:
            if any(isinstance(item, ir.Value) for item in items):
                return f"{parameter.name} is an attribute, and its value is only known at run time"
            continue
        for item in items:
            if not isinstance(item, ir.Value) or item.dtype is None:
                continue
            if parameter.dtypes and item.dtype not in parameter.dtypes:
                return f"{parameter.name} does not take {item.dtype.name.lower()}"
            if groups.setdefault(parameter.group, item.dtype) != item.dtype and parameter.group:
                return f"{parameter.name} is {item.dtype.name.lower()}, not {groups[parameter.group].name.lower()}"
    return None
