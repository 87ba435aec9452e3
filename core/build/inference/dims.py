"""The dimensions of a value, as shape inference, simplification and rewrites read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

#: A dimension: its size, the name of a dynamic size, or ``None`` for an unknown size.
Dim = int | ir.SymbolicDim | None
#: All of them; ``None`` for an unknown rank.
Dims = tuple[Dim, ...] | None
#: A dtype and dimensions for each output; a ``None`` dtype means the schema's.
Result = list[tuple[ir.DataType | None, Dims]]
Inputs = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]


def dims_of(value: ir.Value | None) -> Dims:
    """The dimensions of a value, ``None`` when its rank is unknown."""
    shape = value.shape if value is not None else None
    return None if shape is None else shape.dims


class Constant(ir.Tensor[np.ndarray]):
    """The content of a constant that the builder made.

    Attributes:
        integers: Its elements in a row where they are a few integers or truth values, like shapes and axes, which are read
            often; ``None`` otherwise.
    """

    __slots__ = ("integers",)

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.integers = _integers(array)


def content_key(array: np.ndarray) -> Any:
    """Equal for arrays of the same content; a large array, which a :class:`Constant` keeps alive, is only equal to itself."""
    if array.dtype.kind in "OU":
        return "text", array.shape, tuple(array.flat)
    return (array.dtype, array.shape, array.tobytes()) if array.nbytes <= 65536 else id(array)


def text_tensor(array: np.ndarray) -> ir.StringTensor:
    """The content of a constant of text; bytes, which need not be text by themselves, stay as they are."""
    encoded = np.array([t if isinstance(t, bytes) else t.encode() for t in array.reshape(-1).tolist()], dtype=object)
    return ir.StringTensor(encoded.reshape(array.shape))


def _integers(array: np.ndarray) -> tuple[int, ...] | None:
    return tuple(map(int, array.reshape(-1))) if array.size <= 64 and array.dtype.kind in "iub" else None


def known(value: ir.Value | None) -> Sequence[int] | None:
    """The integers of a constant value, ``None`` when it isn't one."""
    content = value.const_value if value is not None else None
    if content is None:
        return None
    return content.integers if type(content) is Constant else _integers(content.numpy())


def broadcast(shapes: Sequence[Dims]) -> Dims:
    """The dimensions that numpy broadcasting gives; an unknown size broadcast with 1 stays unknown."""
    if any(s is None for s in shapes):
        return None
    present = [s for s in shapes if s is not None]
    longest = max(present, key=len)
    rank = len(longest)
    if all(s is longest or s == longest[rank - len(s) :] for s in present):
        return longest
    result: list[Dim] = []
    for axis in range(-rank, 0):
        dim: Dim = 1
        for shape in present:
            if len(shape) < -axis:
                continue
            other = shape[axis]
            if isinstance(other, int) and other == 1:
                continue
            if isinstance(dim, int) and dim == 1:
                dim = other
            elif isinstance(other, int):
                dim = other
            elif not isinstance(dim, int) and dim != other:
                dim = None
        result.append(dim)
    return tuple(result)


def product(dims: Sequence[Dim]) -> int:
    total = 1
    for dim in dims:
        total *= dim if isinstance(dim, int) else 1
    return total


def axes_of(inputs: Inputs, attributes: Attributes, rank: int) -> list[int] | None:
    """Axes from the attribute or the second input, made non-negative; ``None`` when they aren't known."""
    axes = attributes.get("axes")
    if axes is None and len(inputs) > 1 and inputs[1] is not None:
        axes = known(inputs[1])
        if axes is None:
            return None
    return [a % rank if rank else 0 for a in axes] if axes is not None else []
