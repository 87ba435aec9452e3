"""Memory seen with other strides, and views that are written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of
from onnxplug.errors import Unsupported
from onnxplug.functionalize.layout import source_of
from onnxplug.functionalize.memory import PART_OF_MEMORY
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


class _Memory(NamedTuple):
    """The memory that a tensor lies in, as far as the graph has it.

    Attributes:
        x: The tensor whose elements fill it: the base of the operator's argument, or the argument itself.
        order: Its axes in the order of their strides.
        start: Where in the memory its first element lies.
        total: How many elements it has; ``None`` where that is dynamic.
    """

    x: Value
    order: list[int]
    start: int
    total: int | None

    def elements(self, g: GraphBuilder) -> Value:
        """The elements in the order of the memory."""
        return g.reshape(self.x if _is_sorted(self.order) else g.op.Transpose(self.x, perm=self.order), [-1])

    def back(self, g: GraphBuilder, elements: Value) -> Value:
        """The tensor with other elements, in the order of the memory."""
        sizes = g.dims(self.x)
        shaped = g.reshape(elements, [sizes[axis] for axis in self.order])
        return shaped if _is_sorted(self.order) else g.op.Transpose(shaped, perm=list(np.argsort(self.order)))


def _is_sorted(order: Sequence[int]) -> bool:
    return list(order) == sorted(order)


def _memory(x: Value, val: Any) -> _Memory:
    """The memory of a tensor.

    Args:
        x: The tensor.
        val: Its fake tensor.

    Raises:
        Unsupported: It does not fill the memory between its first and its last element, or its offset depends on sizes.
    """
    strides, sizes = list(val.stride()), list(val.shape)
    order = sorted(range(len(sizes)), key=lambda a: (-_number(strides[a]), a))
    expected: Any = 1
    for axis in reversed(order):
        if not _same(sizes[axis], 1) and not _same(strides[axis], expected):
            raise Unsupported("as_strided of a tensor that does not fill its memory")
        expected = expected * sizes[axis]
    start = val.storage_offset()
    if not isinstance(start, int):
        raise Unsupported("as_strided of a tensor whose place in its memory is only known at run time")
    return _Memory(x, order, start, expected if isinstance(expected, int) else None)


def _source(g: GraphBuilder, node: FxNode, offset: Any) -> _Memory:
    """The memory of an operator's first argument: that of the tensor which it is a view of.

    Args:
        g, node: The builder and the operator.
        offset: Where in the memory the operator begins; ``None`` for where its argument does.

    Raises:
        Unsupported: That tensor's memory is not known in full.
    """
    x, fx = node.args[0], node.fx.args[0]
    assert isinstance(fx, torch.fx.Node)
    source = source_of(fx)
    part = source.meta.get(PART_OF_MEMORY)
    if part or (part is not None and offset is not None):
        raise Unsupported(
            "as_strided of an input whose example is a part of a larger memory, which no model gets; export it with x.clone()"
        )
    if source is fx:
        return _memory(x, node.meta(0))
    value, memory = g.interpreter.value_of(fx), g.interpreter.value_of(source)
    if x is not value:  # a part of a complex tensor, or the integers of a quantised tensor
        parts = [part for part in ("real", "imag", "integers") if getattr(value, part, None) is x]
        if len(parts) != 1:
            raise Unsupported("as_strided of a view of a complex tensor whose parts are one")
        memory = getattr(memory, parts[0])
    return _memory(memory, source.meta["val"])


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

    Elements of the memory that the tensor lies in, gathered at offset + sum of index times stride.
    """
    _, sizes, strides, offset = node.args
    memory = _source(g, node, offset)
    return g.op.Gather(memory.elements(g), _within(g, node, memory, sizes, strides, offset), axis=0)


def _within(
    g: GraphBuilder, node: FxNode, memory: _Memory, sizes: Sequence[Any], strides: Sequence[Any], offset: Any
) -> Value:
    """Places among the elements of a memory.

    Raises:
        Unsupported: They reach, or may reach, elements that the graph lacks.
    """
    if offset is None:
        offset = g.size(g.interpreter.dim(node.meta(0).storage_offset()))
    if memory.start and not isinstance(offset, int):
        raise Unsupported("as_strided at an offset that is only known at run time")
    first = offset - memory.start if memory.start else offset
    last: Any = first
    for size, stride in zip(sizes, strides, strict=True):
        last = last + (size - 1) * stride if all(isinstance(v, int) for v in (last, size, stride)) else None
    beyond = memory.total is not None and isinstance(last, int) and last >= memory.total
    is_empty = any(isinstance(size, int) and size == 0 for size in sizes)
    if isinstance(first, int) and (first < 0 or beyond) and not is_empty:
        raise Unsupported(
            "as_strided reaches elements of the memory that the graph lacks: the tensor is no view of others here"
        )
    return _places(g, sizes, strides, first)


def as_strided_scatter(g: GraphBuilder, node: FxNode) -> Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor

    PyTorch copies the whole memory that the tensor lies in: writes outside of the tensor's own elements are not seen.
    """
    x, source, sizes, strides, offset = node.args
    memory = _source(g, node, offset)
    places = _within(g, node, memory, sizes, strides, offset)
    written = g.op.ScatterElements(memory.elements(g), g.reshape(places, [-1]), g.reshape(source, [-1]), axis=0)
    if memory.x is x:
        return memory.back(g, written)
    val = node.meta(0)
    own_sizes, own_strides = ([g.size(g.interpreter.dim(n)) for n in numbers] for numbers in (val.shape, val.stride()))
    return g.op.Gather(written, _within(g, node, memory, own_sizes, own_strides, None), axis=0)


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
    flat = _memory(x, node.meta(0)).elements(g)
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
