"""Whether a value is of a script's type: ``isinstance`` in a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxplug_torchscript.values import Instance, ScalarTensor

_SIMPLE: dict[str, Callable[[Any], bool]] = {
    "NoneType": lambda value: value is None,
    "IntType": lambda value: isinstance(value, int | torch.SymInt) and not isinstance(value, bool),
    "FloatType": lambda value: isinstance(value, float | torch.SymFloat),
    "ComplexType": lambda value: isinstance(value, complex),
    "BoolType": lambda value: isinstance(value, bool | torch.SymBool),
    "NumberType": lambda value: isinstance(value, int | float | complex | torch.SymInt | torch.SymFloat),
    "StringType": lambda value: isinstance(value, str),
    "TensorType": lambda value: isinstance(value, torch.Tensor | ScalarTensor),
    "DeviceObjType": lambda value: isinstance(value, torch.device),
    "AnyType": lambda value: True,
    "AnyListType": lambda value: isinstance(value, list),
    "AnyTupleType": lambda value: isinstance(value, tuple),
}


def is_instance(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, or of a part of a union; for an empty container only the kind is compared."""
    name = kind.kind()
    if name in _SIMPLE:
        return _SIMPLE[name](value)
    parts = kind.containedTypes()
    if name == "ListType":
        return isinstance(value, list) and all(is_instance(item, parts[0]) for item in value)
    if name == "DictType":
        return isinstance(value, dict) and all(
            is_instance(k, parts[0]) and is_instance(v, parts[1]) for k, v in value.items()
        )
    if name == "TupleType":
        return (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(is_instance(item, part) for item, part in zip(value, parts, strict=True))
        )
    if name == "OptionalType":
        return value is None or any(is_instance(value, part) for part in parts)
    if name == "UnionType":
        return any(is_instance(value, part) for part in parts)
    return isinstance(value, Instance) and value.type_name == kind.annotation_str
