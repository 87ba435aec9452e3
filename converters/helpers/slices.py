"""Slices and diagonals."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze

INT_MAX = (1 << 63) - 1


def slice_axis(g: GraphBuilder, x: Value, axis: int, start: Any, end: Any, step: int = 1) -> Value:
    """``x[start:end:step]`` along one axis. Negative and out-of-range bounds mean the same in ONNX as in torch."""
    start = 0 if start is None else start
    end = INT_MAX if end is None else end
    size = x.shape[axis] if x.shape is not None else None
    if isinstance(start, int) and isinstance(size, int) and start <= -size:
        start = 0
    steps = None if step == 1 else g.vector([step])
    return g.op.Slice(x, g.as_vector(start), g.as_vector(end), g.vector([axis]), steps)


def diagonal_of(g: GraphBuilder, x: Value, offset: int, first: int, second: int) -> Value:
    """The diagonal of two axes, as a new last axis."""
    rank = rank_of(x)
    first, second = normalize_axis(first, rank), normalize_axis(second, rank)
    others = [a for a in range(rank) if a not in (first, second)]
    moved = g.op.Transpose(x, perm=[first, second, *others])
    rows, columns = g.as_scalar(g.dim(x, first)), g.as_scalar(g.dim(x, second))
    up, down = max(offset, 0), max(-offset, 0)
    length = g.op.Max(g.op.Min(g.op.Sub(rows, g.const(down)), g.op.Sub(columns, g.const(up))), g.const(0))
    steps = g.op.Range(g.const(0), length, g.const(1))
    index = g.op.Concat(
        unsqueeze(g, g.op.Add(steps, g.const(down)), 1), unsqueeze(g, g.op.Add(steps, g.const(up)), 1), axis=1
    )
    picked = g.op.GatherND(moved, index)
    count = rank - 1
    return g.op.Transpose(picked, perm=[*range(1, count), 0])
