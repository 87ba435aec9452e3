"""The inputs of a run, checked against the graph's declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxplug.build.dtypes import ONNX_TO_TORCH
from onnxplug.errors import UsageError
from onnxplug_reference.graphs import ReadyGraph
from onnxplug_reference.trace import short


def checked_feeds(graph: ReadyGraph, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Values by input name; an initializer may be replaced too.

    Raises:
        UsageError: An input is unknown, missing or of another type.
    """
    known = {*graph.inputs, *graph.initializers}
    unknown = [name for name in feeds if name not in known]
    if unknown:
        raise UsageError(
            f"the model has no input {', '.join(map(repr, unknown))}; its inputs are {', '.join(graph.inputs) or 'none'}"
        )
    missing = [name for name in graph.inputs if name not in feeds and name not in graph.initializers]
    if missing:
        raise UsageError(f"the model needs the input {', '.join(map(repr, missing))}")
    values = {name: _array(value) for name, value in feeds.items()}
    for name, value in values.items():
        declared = graph.types.get(name)
        if declared is not None:
            _check(name, value, declared)
    return values


def _array(value: Any) -> Any:
    """Numbers as arrays; arrays, sequences, maps and absent values unchanged."""
    return np.asarray(value) if isinstance(value, bool | int | float | np.generic) else value


def _check(name: str, value: Any, declared: onnx.TypeProto) -> None:
    """Checks a value against its declaration; maps and sparse tensors aren't checked.

    Raises:
        UsageError: It is of another kind, type or shape.
    """
    if declared.HasField("optional_type"):
        if value is not None:
            _check(name, value, declared.optional_type.elem_type)
    elif declared.HasField("sequence_type"):
        if not isinstance(value, list):
            raise UsageError(f"the input {name!r} is a sequence, a list of values, got {short(value)}")
        for place, element in enumerate(value):
            _check(f"{name}[{place}]", _array(element), declared.sequence_type.elem_type)
    elif declared.HasField("tensor_type"):
        _check_tensor(name, value, declared.tensor_type)


def _check_tensor(name: str, value: Any, declared: onnx.TypeProto.Tensor) -> None:
    """Checks an array, or a tensor of PyTorch, against its declaration.

    Raises:
        UsageError: The value is no tensor, or its type or shape differs.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise UsageError(f"the input {name!r} is a tensor, got a {type(value).__name__}")
    wanted = ir.DataType(declared.elem_type)
    if not isinstance(value, np.ndarray):
        fits = not declared.elem_type or ONNX_TO_TORCH.get(wanted) == value.dtype
    elif declared.elem_type == onnx.TensorProto.STRING:
        fits = value.dtype.kind in "OUS"
    else:
        fits = not declared.elem_type or value.dtype == wanted.numpy()
    dims = [d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim]
    if declared.HasField("shape"):
        fits = fits and len(dims) == len(value.shape)
        fits = fits and all(size in (None, got) for size, got in zip(dims, value.shape, strict=True))
    if not fits:
        sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in declared.shape.dim]
        shape = f"[{', '.join(map(str, sizes))}]" if declared.HasField("shape") else ""
        raise UsageError(f"the input {name!r} is {wanted.name.lower()}{shape} in the model, got {short(value)}")
