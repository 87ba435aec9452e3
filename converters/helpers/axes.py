"""Axes: rank, normal form, insertion and removal."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import Unsupported


def rank_of(x: Value) -> int:
    """The number of dimensions of a value.

    Raises:
        Unsupported: It is unknown.
    """
    if x.shape is None:
        raise Unsupported("the rank of an input is unknown")
    return len(x.shape)


def normalize_axis(axis: int, rank: int) -> int:
    """The axis as a non-negative number; 0 for a 0-dim tensor, for which torch accepts the axes 0 and -1."""
    return axis % rank if rank else 0


def normalize_axes(axes: int | Sequence[int] | None, rank: int) -> list[int]:
    """Non-negative axes; ``None`` and the empty list mean all of them."""
    if axes is None:
        return list(range(rank))
    if isinstance(axes, int):
        axes = [axes]
    return [normalize_axis(a, rank) for a in axes] if axes else list(range(rank))


def unsqueeze(g: GraphBuilder, x: Value, *axes: int) -> Value:
    """``x`` with axes of size 1 inserted."""
    return g.op.Unsqueeze(x, g.vector(axes))


def squeeze(g: GraphBuilder, x: Value, *axes: int) -> Value:
    """``x`` without these axes, whose size is 1."""
    if not axes:  # ONNX Runtime reads an empty list of axes as all axes of size 1.
        return x
    return g.op.Squeeze(x, g.vector(axes))


def swap(g: GraphBuilder, x: Value, first: int, second: int) -> Value:
    """Two axes exchanged."""
    rank = rank_of(x)
    if rank < 2:
        return x
    order = list(range(rank))
    a, b = first % rank, second % rank
    order[a], order[b] = order[b], order[a]
    return g.op.Transpose(x, perm=order)
