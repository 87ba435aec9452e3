"""Parts of a tensor along an axis: slices, pieces, reversals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.converters.helpers.slices import INT_MAX, slice_axis
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_INT_MIN = -INT_MAX


def slice_(g: GraphBuilder, node: FxNode) -> Value:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"""
    x, axis, start, end, step = node.args
    axis = normalize_axis(axis, rank_of(x))
    if isinstance(step, Value):
        raise Unsupported("a slice whose step is only known at run time")
    return slice_axis(g, x, axis, start, end, step)


def select(g: GraphBuilder, node: FxNode) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    x, axis, index = node.args
    return g.op.Gather(x, g.as_scalar(index), axis=normalize_axis(axis, rank_of(x)))


def narrow(g: GraphBuilder, node: FxNode) -> Value:
    """narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)"""
    x, axis, start, length = node.args
    axis = normalize_axis(axis, rank_of(x))
    if isinstance(start, Value):
        start = g.cast(g.reshape(start, []) if rank_of(start) else start, INT64)
        if not g.sizes.never_negative(start):
            from_end = g.op.Add(start, g.as_scalar(g.dim(x, axis)))
            start = g.op.Where(g.op.Less(start, g.const(0)), from_end, start)
    elif start < 0:
        size = g.dim(x, axis)
        start = start + size if isinstance(size, int) else g.op.Add(g.const(start), size)
    if isinstance(start, int) and isinstance(length, int):
        return slice_axis(g, x, axis, start, start + length)
    return slice_axis(g, x, axis, start, g.op.Add(g.as_scalar(start), g.as_scalar(length)))


def split(g: GraphBuilder, node: FxNode) -> list[Value]:
    """split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"""
    x, size, axis = node.args
    return _pieces(g, node, x, normalize_axis(axis, rank_of(x)), size)


def split_with_sizes(g: GraphBuilder, node: FxNode) -> list[Value]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    x, sizes, axis = node.args
    return _split(g, x, normalize_axis(axis, rank_of(x)), list(sizes))


def chunk(g: GraphBuilder, node: FxNode) -> list[Value]:
    """chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]"""
    x, _, axis = node.args
    return _pieces(g, node, x, normalize_axis(axis, rank_of(x)), None)


def _pieces(g: GraphBuilder, node: FxNode, x: Value, axis: int, size: Any) -> list[Value]:
    """Equal pieces, the last piece smaller: sizes as torch computed them, or slices of a dynamic axis."""
    sizes = [spec.shape[axis] if spec is not None else None for spec in node.outputs]
    if all(isinstance(s, int) for s in sizes):
        return _split(g, x, axis, sizes)
    if size is None:
        count = len(sizes)
        total = g.as_scalar(g.dim(x, axis))
        size = g.op.Div(g.op.Add(total, g.const(count - 1)), g.const(count))
    pieces = []
    for number in range(len(sizes)):
        if isinstance(size, int):
            pieces.append(slice_axis(g, x, axis, number * size, (number + 1) * size))
        else:
            start = g.op.Mul(size, g.const(number))
            pieces.append(slice_axis(g, x, axis, start, g.op.Add(start, size)))
    return pieces


def _split(g: GraphBuilder, x: Value, axis: int, sizes: list[Any]) -> list[Value]:
    if len(sizes) == 1:
        return [x]
    return list(g.op.Split(x, g.vector(sizes), axis=axis, _outputs=len(sizes)))


def tensor_split(g: GraphBuilder, node: FxNode) -> list[Value]:
    """tensor_split.sections(Tensor(a -> *) self, SymInt sections, int dim=0) -> Tensor(a)[]"""
    x, _, axis = node.args
    return _sections(g, node, x, normalize_axis(axis, rank_of(x)))


def _sections(g: GraphBuilder, node: FxNode, x: Value, axis: int) -> list[Value]:
    sizes = [spec.shape[axis] if spec is not None else None for spec in node.outputs]
    if all(isinstance(s, int) for s in sizes):
        return _split(g, x, axis, sizes)
    # The first (size mod pieces) of the pieces have one element more.
    total, pieces = g.as_scalar(g.dim(x, axis)), g.const(len(sizes))
    each, more = g.op.Div(total, pieces), g.op.Mod(total, pieces)
    bounds = [g.op.Add(g.op.Mul(each, g.const(i)), g.op.Min(more, g.const(i))) for i in range(1, len(sizes))]
    return [slice_axis(g, x, axis, start, end) for start, end in pairwise([0, *bounds, None])]


def tensor_split_at(g: GraphBuilder, node: FxNode) -> list[Value]:
    """tensor_split.indices(Tensor(a -> *) self, SymInt[] indices, int dim=0) -> Tensor(a)[]"""
    x, places, axis = node.args
    return _between(g, x, places, normalize_axis(axis, rank_of(x)))


def _between(g: GraphBuilder, x: Value, places: list[Any], axis: int) -> list[Value]:
    """The pieces between the indices, which have the meaning of a slice's bounds."""
    return [slice_axis(g, x, axis, start, end) for start, end in pairwise([0, *places, None])]


#: hsplit, vsplit and dsplit: name to the axis that they split. hsplit splits the only axis of a vector.
_SPLIT_AXES = {"hsplit": 1, "vsplit": 0, "dsplit": 2}


def split_axis(axis: int, by_indices: bool) -> Converter:
    """hsplit.int(Tensor(a -> *) self, int sections) -> Tensor(a)[], hsplit.array(Tensor(a -> *) self, int[] indices)
    -> Tensor(a)[], and their siblings for other axes."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, pieces = node.args
        at = min(axis, rank_of(x) - 1)
        return _between(g, x, pieces, at) if by_indices else _sections(g, node, x, at)

    convert.__name__ = convert.__qualname__ = "split_axis"
    return convert


def unbind(g: GraphBuilder, node: FxNode) -> list[Value]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]

    One Gather a piece: fewer nodes than Split with a Squeeze for each.
    """
    x, axis = node.args
    axis = normalize_axis(axis, rank_of(x))
    return [g.op.Gather(x, g.const(i), axis=axis) for i in range(len(node.outputs))]


def flip(g: GraphBuilder, node: FxNode) -> Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    x, axes = node.args
    rank = rank_of(x)
    if not rank or not axes:
        return x
    count = len(axes)
    return g.op.Slice(
        x,
        np.full(count, -1),
        np.full(count, _INT_MIN),
        np.array([normalize_axis(a, rank) for a in axes]),
        np.full(count, -1),
    )


def roll(g: GraphBuilder, node: FxNode) -> Value:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    x, shifts, axes = node.args
    if not rank_of(x):
        return x
    if not axes:
        flat = g.reshape(x, [-1])
        return g.reshape(_roll(g, flat, shifts[0], 0), g.dims(x))
    for shift, axis in zip(shifts, axes, strict=True):
        x = _roll(g, x, shift, normalize_axis(axis, rank_of(x)))
    return x


def _roll(g: GraphBuilder, x: Value, shift: Any, axis: int) -> Value:
    size = g.dim(x, axis)
    if isinstance(shift, int) and isinstance(size, int):
        shift = shift % size if size else 0
        if shift == 0:
            return x
        cut: Any = size - shift
    else:
        # n - (shift mod n), where n may be 0.
        whole = g.op.Max(g.as_scalar(size), g.const(1))
        cut = g.op.Sub(whole, g.op.Mod(g.as_scalar(shift), whole))
    return g.op.Concat(slice_axis(g, x, axis, cut, None), slice_axis(g, x, axis, 0, cut), axis=axis)


def _places(g: GraphBuilder, x: Value, axis: int, start: Any, end: Any, step: int) -> Value:
    """The indices that a slice of an axis covers."""
    positions = g.op.Range(g.const(0), g.as_scalar(g.dim(x, axis)), g.const(1))
    return slice_axis(g, positions, 0, start, end, step)


def select_scatter(g: GraphBuilder, node: FxNode) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    x, source, axis, index = node.args
    axis = normalize_axis(axis, rank_of(x))
    source = unsqueeze(g, g.cast(source, x.dtype), axis)
    place = g.as_scalar(index)
    return _scatter(g, x, source, axis, unsqueeze(g, place, 0))


def slice_scatter(g: GraphBuilder, node: FxNode) -> Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    x, source, axis, start, end, step = node.args
    axis = normalize_axis(axis, rank_of(x))
    size = x.shape[axis] if x.shape is not None else None
    source = g.cast(source, x.dtype)
    everything = (start is None or start == 0) and (
        end is None or (isinstance(end, int) and (end >= INT_MAX or (isinstance(size, int) and end >= size)))
    )
    if everything and step == 1:
        if tuple(source.shape or ()) == tuple(x.shape or ()):
            return source
        return g.op.Expand(source, g.shape(x))
    return _scatter(g, x, source, axis, _places(g, x, axis, start, end, step))


def _scatter(g: GraphBuilder, x: Value, source: Value, axis: int, places: Value) -> Value:
    """``x`` with the slices at ``places`` along an axis replaced: ScatterND with that axis first."""
    rank = rank_of(x)
    order = [axis, *(a for a in range(rank) if a != axis)]
    back = [order.index(a) for a in range(rank)]
    scattered = g.op.ScatterND(
        g.op.Transpose(x, perm=order), unsqueeze(g, places, 1), g.op.Transpose(source, perm=order)
    )
    return g.op.Transpose(scattered, perm=back)


RULES: list[Rule] = [
    Rule("aten::slice.Tensor", slice_),
    Rule("aten::slice_copy.Tensor", slice_),
    Rule("aten::select.int", select),
    Rule("aten::select_copy.int", select),
    Rule("aten::narrow.default", narrow),
    Rule("aten::narrow.Tensor", narrow),
    Rule("aten::split.Tensor", split),
    Rule("aten::unsafe_split.Tensor", split),
    Rule("aten::split.sizes", split_with_sizes),
    Rule("aten::split_with_sizes.default", split_with_sizes),
    Rule("aten::unsafe_split_with_sizes.default", split_with_sizes),
    Rule("aten::chunk.default", chunk),
    Rule("aten::unsafe_chunk.default", chunk),
    Rule("aten::tensor_split.sections", tensor_split),
    Rule("aten::tensor_split.indices", tensor_split_at),
    *(
        Rule(f"aten::{name}.{overload}", split_axis(axis, overload == "array"))
        for name, axis in _SPLIT_AXES.items()
        for overload in ("int", "array")
    ),
    Rule("aten::unbind.int", unbind),
    Rule("aten::flip.default", flip),
    Rule("aten::roll.default", roll),
    Rule("aten::select_scatter.default", select_scatter),
    Rule("aten::slice_scatter.default", slice_scatter),
]
