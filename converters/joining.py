"""Tensors put together or repeated."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.broadcasting import expand_to
from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.converters.helpers.order import count_below
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def cat(g: GraphBuilder, node: FxNode) -> Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor

    Operands promote. Empty 1-dim tensors of any dtype are left out: torch allows them for compatibility.
    """
    tensors, axis = node.args
    kept = [x for x in tensors if not (rank_of(x) == 1 and x.shape[0] == 0 and len(node.shape) != 1)]
    rank = len(node.shape)
    return g.op.Concat(*[g.cast(x, node.dtype) for x in kept], axis=normalize_axis(axis, rank))


def stack(g: GraphBuilder, node: FxNode) -> Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    tensors, axis = node.args
    axis %= len(node.shape)
    return g.op.Concat(*[unsqueeze(g, g.cast(x, node.dtype), axis) for x in tensors], axis=axis)


def repeat(g: GraphBuilder, node: FxNode) -> Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    x, repeats = node.args
    return _tile(g, x, list(repeats))


def tile(g: GraphBuilder, node: FxNode) -> Value:
    """tile(Tensor self, SymInt[] dims) -> Tensor"""
    x, repeats = node.args
    return _tile(g, x, [1] * (rank_of(x) - len(repeats)) + list(repeats))


def _tile(g: GraphBuilder, x: Value, repeats: list[Any]) -> Value:
    missing = len(repeats) - rank_of(x)
    if missing:
        x = unsqueeze(g, x, *range(missing))
    if all(isinstance(r, int) and r == 1 for r in repeats):
        return x
    if all(isinstance(d, int) and d == 1 for d, r in zip(x.shape or (), repeats, strict=True) if r != 1):
        return g.op.Expand(x, g.vector(repeats))
    result = g.op.Tile(x, g.vector(repeats))
    return result


def repeat_interleave(g: GraphBuilder, node: FxNode) -> Value:
    """repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim=None, *, SymInt? output_size=None) -> Tensor"""
    x, repeats, axis = node.args[:3]
    if axis is None:
        x, axis = g.reshape(x, [-1]), 0
    axis = normalize_axis(axis, rank_of(x))
    wide = unsqueeze(g, x, axis + 1)
    sizes: list[Any] = [1] * (rank_of(x) + 1)
    sizes[axis + 1] = repeats
    wide = g.op.Expand(wide, g.vector(sizes))
    shape: list[Any] = list(g.dims(x))
    shape[axis] = node.shape[axis] if isinstance(node.shape[axis], int) else None
    if shape[axis] is None:
        size = g.dim(x, axis)
        shape[axis] = g.op.Mul(g.as_scalar(size), g.as_scalar(repeats))
        if sum(not isinstance(size, int) for size in shape) > 1:
            # A size that is inferred is an error of ONNX Runtime where another size is 0.
            return g.op.Reshape(wide, g.vector(shape))
    return g.reshape(wide, shape)


def repeats_as_indices(g: GraphBuilder, node: FxNode) -> Value:
    """repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor

    Repeats each index by its element: position i takes the first index whose cumulative sum exceeds i.
    """
    repeats = g.cast(node.args[0], INT64)
    ends = g.op.CumSum(repeats, g.const(0))
    total = g.op.ReduceSum(repeats, keepdims=0)
    places = g.op.Range(g.const(0), total, g.const(1))
    return g.cast(count_below(g, ends, places, True, INT64), node.dtype)


def meshgrid(g: GraphBuilder, node: FxNode) -> list[Value]:
    """meshgrid.indexing(Tensor[] tensors, *, str indexing) -> Tensor[]"""
    tensors = node.args[0]
    swapped = len(node.args) > 1 and node.args[1] == "xy" and len(tensors) >= 2
    rank = len(tensors)
    axes = list(range(rank))
    if swapped:
        axes[0], axes[1] = 1, 0
    sizes: list[Any] = [1] * rank
    for x, axis in zip(tensors, axes, strict=True):
        sizes[axis] = g.dim(x, 0) if rank_of(x) else 1
    results = []
    for x, axis, spec in zip(tensors, axes, node.outputs, strict=True):
        shape: list[Any] = [1] * rank
        shape[axis] = sizes[axis]
        assert spec is not None
        results.append(expand_to(g, g.reshape(x, shape), spec.shape, sizes))
    return results


RULES: list[Rule] = [
    Rule("aten::repeat_interleave.Tensor", repeats_as_indices),
    Rule("aten::cat.default", cat),
    Rule("aten::concat.default", cat),
    Rule("aten::concatenate.default", cat),
    Rule("aten::stack.default", stack),
    Rule("aten::repeat.default", repeat),
    Rule("aten::tile.default", tile),
    Rule("aten::repeat_interleave.self_int", repeat_interleave),
    Rule("aten::meshgrid.default", meshgrid),
    Rule("aten::meshgrid.indexing", meshgrid),
]
