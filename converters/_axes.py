"""Axes and reductions, the same at every opset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import Unsupported

#: Opset from which a reduction takes its axes as an input, not as an attribute.
_AXES_ARE_INPUT = {"ReduceSum": 13}
_AXES_ARE_INPUT_DEFAULT = 18


def rank_of(x: Value) -> int:
    """The number of dimensions of a value.

    Raises:
        Unsupported: It is unknown.
    """
    if x.shape is None:
        raise Unsupported("the rank of an input is unknown")
    return len(x.shape)


def normalize_axis(axis: int, rank: int) -> int:
    """A non-negative axis; 0 for a 0-dim tensor, as torch has it."""
    return axis % rank if rank else 0


def normalize_axes(axes: int | Sequence[int] | None, rank: int) -> list[int]:
    """Non-negative axes; ``None`` and the empty list mean all of them."""
    if axes is None:
        return list(range(rank))
    if isinstance(axes, int):
        axes = [axes]
    return [normalize_axis(a, rank) for a in axes] if axes else list(range(rank))


def reduce(g: GraphBuilder, op_type: str, x: Value, axes: Sequence[int] | None, keepdims: bool) -> Value:
    """A reduction over non-negative static axes (``None``: all), by attribute or input as the opset has it.

    A 0-dim tensor has no axes to reduce: it is reduced over none, which for every reduction here but those that change a
    single element (ReduceSumSquare, ReduceL1 …) is the identity; ONNX itself does it with an absent axes input.
    """
    rank = rank_of(x)
    every = axes is None or len(axes) == rank
    emit: Any = getattr(g.op, op_type)
    keep = int(keepdims)
    if every:
        result: Value = emit(x, keepdims=keep)
    elif g.opset >= _AXES_ARE_INPUT.get(op_type, _AXES_ARE_INPUT_DEFAULT):
        result = emit(x, g.const(np.array(axes, dtype=np.int64)), keepdims=keep)
    else:
        result = emit(x, axes=list(axes or ()), keepdims=keep)
    return result


def unsqueeze(g: GraphBuilder, x: Value, *axes: int) -> Value:
    """``x`` with axes of size 1 inserted."""
    result: Value = g.op.Unsqueeze(x, g.const(np.array(axes, dtype=np.int64)))
    return result


def squeeze(g: GraphBuilder, x: Value, *axes: int) -> Value:
    """``x`` without these axes, whose size is 1."""
    if not axes:  # ONNX Runtime takes no axes for all of size 1.
        return x
    result: Value = g.op.Squeeze(x, g.const(np.array(axes, dtype=np.int64)))
    return result
