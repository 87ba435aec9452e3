"""Memory seen with other strides, and views that are written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _storage(g: GraphBuilder, node: FxNode, x: Value) -> tuple[Value, int, list[int]]:
    """The elements in the order of their memory, where the first of them lies, and the order of the axes in it.

    Raises:
        Unsupported: The tensor is a view of larger memory, whose other elements are not in the graph.
    """
    meta = node.meta(0)
    strides, sizes = list(meta.stride()), list(meta.shape)
    order = sorted(range(len(sizes)), key=lambda a: (-_number(strides[a]), a))
    expected: Any = 1
    for axis in reversed(order):
        if not _same(sizes[axis], 1) and not _same(strides[axis], expected):
            raise Unsupported("as_strided of a tensor that does not fill its memory")
        expected = expected * sizes[axis]
    if order != list(range(len(sizes))):
        x = g.op.Transpose(x, perm=order)
    return g.reshape(x, [-1]), int(meta.storage_offset()), order


def _number(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint or 1)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def _places(g: GraphBuilder, sizes: Sequence[Any], strides: Sequence[Any], offset: Any) -> Value:
    """offset + sum of index times stride, for every index."""
    if all(isinstance(v, int) for v in (*sizes, *strides, offset)):
        total = np.full([1] * len(sizes), offset, dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            steps = np.arange(size, dtype=np.int64) * stride
            total = total + steps.reshape([-1 if a == axis else 1 for a in range(len(sizes))])
        return g.const(total.reshape(tuple(sizes)))
    places = g.as_scalar(offset)
    for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        steps = g.op.Mul(g.op.Range(g.const(0), g.as_scalar(size), g.const(1)), g.as_scalar(stride))
        column = [1] * len(sizes)
        column[axis] = -1
        places = g.op.Add(places, g.op.Reshape(steps, g.const(np.array(column, dtype=np.int64))))
    return places


def as_strided(g: GraphBuilder, node: FxNode) -> Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)

    Elements of the tensor's memory, gathered at offset + sum of index times stride.
    """
    x, sizes, strides, offset = node.args
    flat, start, _ = _storage(g, node, x)
    places = _places(g, sizes, strides, _from(start, offset))
    return g.op.Gather(flat, places, axis=0)


def _from(start: int, offset: Any) -> Any:
    """Where in the tensor's own elements the memory offset lies."""
    if offset is None:
        return 0
    if start and not isinstance(offset, int):
        raise Unsupported("as_strided at an offset that is only known at run time")
    return offset - start if start else offset


def as_strided_scatter(g: GraphBuilder, node: FxNode) -> Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""
    x, source, sizes, strides, offset = node.args
    flat, start, order = _storage(g, node, x)
    places = _places(g, sizes, strides, _from(start, offset))
    result = g.op.ScatterElements(flat, g.reshape(places, [-1]), g.reshape(source, [-1]), axis=0)
    sizes_of_x = g.dims(x)
    shaped = g.reshape(result, [sizes_of_x[a] for a in order])
    if order == list(range(len(order))):
        return shaped
    return g.op.Transpose(shaped, perm=[order.index(a) for a in range(len(order))])


def diagonal_scatter(g: GraphBuilder, node: FxNode) -> Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor

    With both axes last, the diagonal is a strided slice of the flattened matrix.
    """
    x, source, offset, first, second = node.args
    rank = rank_of(x)
    first, second = normalize_axis(first, rank), normalize_axis(second, rank)
    order = [a for a in range(rank) if a not in (first, second)] + [first, second]
    moved = g.op.Transpose(x, perm=order)
    rows, columns = g.dim(x, first), g.dim(x, second)
    length = g.as_scalar(g.dim(source, rank - 2))
    steps = g.op.Range(g.const(0), length, g.const(1))
    row = g.op.Add(steps, g.const(max(0, -offset)))
    column = g.op.Add(steps, g.const(max(0, offset)))
    places = g.op.Add(g.op.Mul(row, g.as_scalar(columns)), column)
    batch: list[Any] = [g.dim(x, a) for a in order[:-2]]
    plane = rows * columns if isinstance(rows, int) and isinstance(columns, int) else g.op.Mul(rows, columns)
    flat = g.op.Reshape(moved, g.vector([*batch, plane]))
    index = g.op.Expand(places, g.shape(source))
    result = g.op.ScatterElements(flat, index, source, axis=-1)
    back = g.op.Reshape(result, g.shape(moved))
    return g.op.Transpose(back, perm=[order.index(a) for a in range(rank)])


def resize(g: GraphBuilder, node: FxNode) -> Value:
    """resize(Tensor self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor

    The first elements in another shape; memory that torch leaves unwritten is 0.
    """
    x, sizes = node.args[:2]
    flat, _, _ = _storage(g, node, x)
    shape = g.vector(sizes)
    count = g.op.ReduceProd(shape, keepdims=1)
    missing = g.op.Max(g.op.Sub(count, g.op.Shape(flat)), g.const([0]))
    padded = g.op.Concat(flat, g.op.Expand(g.const(0, node.dtype), missing), axis=0)
    first = g.op.Slice(padded, np.array([0]), count, np.array([0]))
    return g.op.Reshape(first, shape)


RULES: list[Rule] = [
    Rule("aten::as_strided.default", as_strided),
    Rule("aten::as_strided_copy.default", as_strided),
    Rule("aten::as_strided_scatter.default", as_strided_scatter),
    Rule("prims::as_strided.default", as_strided),
    Rule("prims::as_strided_scatter.default", as_strided_scatter),
    Rule("aten::diagonal_scatter.default", diagonal_scatter),
    Rule("aten::resize.default", resize),
]
