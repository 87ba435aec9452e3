"""Index tensors of advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.errors import Unsupported


def index_tensors(g: GraphBuilder, x: Value, indices: Sequence[Any]) -> tuple[list[int], list[Value]]:
    """The indexed axes and an int64 tensor for each; a bool mask becomes a tensor for each dimension of the mask."""
    axes: list[int] = []
    tensors: list[Value] = []
    axis = 0
    for item in indices:
        if item is None:
            axis += 1
        elif item.dtype in (BOOL, ir.DataType.UINT8):
            places = g.op.NonZero(g.cast(item, BOOL))
            if not rank_of(item):
                raise Unsupported("indexing by a 0-dim mask")
            for number in range(rank_of(item)):
                axes.append(axis)
                tensors.append(g.op.Gather(places, g.const(number), axis=0))
                axis += 1
        else:
            axes.append(axis)
            tensors.append(g.cast(item, INT64))
            axis += 1
    if axis > rank_of(x):
        raise Unsupported("more indices than dimensions")
    return axes, tensors


def join_indices(g: GraphBuilder, tensors: Sequence[Value]) -> tuple[Value, int]:
    """Index tensors broadcast against each other and stacked along a new last axis; and the rank that they broadcast to."""
    rank = max(rank_of(t) for t in tensors)
    first = tuple(tensors[0].shape or ())
    same = all(tuple(t.shape or ()) == first for t in tensors) and all(
        isinstance(d, int) or d.value is not None for d in first
    )
    if not same:
        total: Value | None = None
        for tensor in tensors:
            zeros = g.op.Mul(tensor, g.const(0))
            total = zeros if total is None else g.op.Add(total, zeros)
        assert total is not None
        tensors = [g.op.Add(t, total) for t in tensors]
    joined = g.op.Concat(*[unsqueeze(g, t, rank) for t in tensors], axis=rank)
    return joined, rank
