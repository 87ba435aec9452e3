"""Constant folding: ai.onnx operators on small known tensors, computed by numpy as ONNX defines them.

Each function takes ``(arrays, attributes)``, where absent inputs are ``None``, and returns one array. Only operators whose
numpy result is exactly ONNX's are here; a function returns ``None`` to leave a case alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxplug.build.spec import MAX_FOLDED

Arrays = Sequence[Any]
Attributes = Mapping[str, Any]
Folder = Callable[[Arrays, Attributes], "np.ndarray | None"]


def _div(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    a, b = arrays
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    if np.any(b == 0) or a.dtype.itemsize < 4:
        return None
    # ONNX Runtime divides integers as C does: towards zero. numpy floors.
    quotient = a // b
    return np.asarray(quotient + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype))


def _mod(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    a, b = arrays
    if a.dtype.kind not in "iu" or np.any(b == 0):
        return None
    return np.asarray(np.fmod(a, b) if attributes.get("fmod") else np.mod(a, b))


def _cast(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    array, target = arrays[0], ir.DataType(attributes["to"])
    if target in (ir.DataType.STRING, ir.DataType.UNDEFINED) or target.bitwidth < 8:
        return None
    if array.dtype.kind == "f" and target.numpy().kind in "iu" and not np.all(np.isfinite(array)):
        return None
    with np.errstate(all="ignore"):
        result = np.asarray(array.astype(target.numpy()))
    if target.is_floating_point() and target.bitwidth == 8 and not np.all(np.isfinite(result.astype(np.float32))):
        # Whether numbers out of range saturate depends on the node.
        return None
    return result


def _reshape(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, shape = arrays
    target = [int(s) for s in shape]
    if not attributes.get("allowzero"):
        target = [data.shape[i] if s == 0 else s for i, s in enumerate(target)]
    return np.asarray(data.reshape(target))


def _axes(arrays: Arrays, attributes: Attributes) -> tuple[int, ...] | None:
    if len(arrays) > 1 and arrays[1] is not None:
        return tuple(int(a) for a in arrays[1].reshape(-1))
    axes = attributes.get("axes")
    return tuple(axes) if axes is not None else None


def _squeeze(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    axes = _axes(arrays, attributes)
    return None if axes == () else np.asarray(np.squeeze(arrays[0], axes))


def _unsqueeze(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    axes = _axes(arrays, attributes)
    return np.asarray(np.expand_dims(arrays[0], axes)) if axes is not None else None


def _slice(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, starts, ends, *rest = arrays
    axes = rest[0] if rest and rest[0] is not None else range(len(starts))
    steps = rest[1] if len(rest) > 1 and rest[1] is not None else [1] * len(starts)
    index = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            return None
        index[int(axis)] = slice(int(start), int(end), int(step))
    return np.asarray(data[tuple(index)])


def _gather(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    return np.asarray(np.take(arrays[0], arrays[1], axis=attributes.get("axis", 0)))


def _concat(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    return np.concatenate(arrays, axis=attributes["axis"])


def _transpose(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    return np.ascontiguousarray(np.transpose(arrays[0], attributes.get("perm")))


def _expand(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    shape = np.broadcast_shapes(arrays[0].shape, tuple(int(s) for s in arrays[1]))
    if math.prod(shape) > MAX_FOLDED:
        return None
    return np.ascontiguousarray(np.broadcast_to(arrays[0], shape))


def _range(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    start, limit, delta = (a.reshape(()) for a in arrays)
    if start.dtype.kind != "i" or delta == 0 or abs((int(limit) - int(start)) // int(delta)) > MAX_FOLDED:
        return None
    return np.arange(int(start), int(limit), int(delta), dtype=start.dtype)


def _constant_of_shape(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    shape = tuple(int(s) for s in arrays[0])
    if math.prod(shape) > MAX_FOLDED:
        return None
    value = attributes.get("value")
    fill = value.numpy().reshape(()) if value is not None else np.float32(0)
    return np.full(shape, fill, fill.dtype)


def _where(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    return np.asarray(np.where(*arrays))


def _reduce(function: Callable[..., Any]) -> Folder:
    def fold(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
        if arrays[0].dtype.kind not in "iu" or arrays[0].size == 0:
            return None
        axes = _axes(arrays, attributes)
        if axes == () and attributes.get("noop_with_empty_axes"):
            return np.asarray(arrays[0])
        keep = bool(attributes.get("keepdims", 1))
        result = function(arrays[0], axis=axes or None, keepdims=keep)
        return np.asarray(result).astype(arrays[0].dtype)

    return fold


def _elementwise(function: Callable[..., Any]) -> Folder:
    def fold(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
        with np.errstate(all="ignore"):
            return np.asarray(function(*arrays))

    return fold


def _extremum(function: Callable[..., Any]) -> Folder:
    def fold(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
        result = arrays[0]
        for array in arrays[1:]:
            result = function(result, array)
        return np.asarray(result)

    return fold


FOLD: dict[str, Folder] = {
    "Abs": _elementwise(np.abs),
    "Add": _elementwise(np.add),
    "And": _elementwise(np.logical_and),
    "Cast": _cast,
    "Ceil": _elementwise(np.ceil),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _div,
    "Equal": _elementwise(np.equal),
    "Expand": _expand,
    "Floor": _elementwise(np.floor),
    "Gather": _gather,
    "Greater": _elementwise(np.greater),
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "Less": _elementwise(np.less),
    "LessOrEqual": _elementwise(np.less_equal),
    "Max": _extremum(np.maximum),
    "Min": _extremum(np.minimum),
    "Mod": _mod,
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Not": _elementwise(np.logical_not),
    "Or": _elementwise(np.logical_or),
    "Range": _range,
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "Reshape": _reshape,
    "Slice": _slice,
    "Sqrt": _elementwise(np.sqrt),
    "Squeeze": _squeeze,
    "Sub": _elementwise(np.subtract),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
    "Xor": _elementwise(np.logical_xor),
}
