"""Shapes and the order of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axes, normalize_axis, rank_of, squeeze, swap, unsqueeze
from onnxplug.converters.helpers.broadcasting import expand_to
from onnxplug.converters.helpers.slices import diagonal_of
from onnxplug.converters.helpers.windows import windows_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def known_sizes(node: FxNode, requested: Sequence[Any]) -> list[Any]:
    """The sizes of a result: ints where torch or the program knows them, otherwise the program's values, or -1.

    The program may give an int where torch's shape has a long expression that it cannot simplify.
    """
    return [d if isinstance(d, int) else s for d, s in zip(node.shape, requested, strict=True)]


def view(g: GraphBuilder, node: FxNode) -> Value:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    return g.reshape(node.args[0], known_sizes(node, node.args[1]))


def reshape_to_result(g: GraphBuilder, node: FxNode) -> Value:
    """flatten.using_ints(Tensor(a) self, int start_dim=0, int end_dim=-1) -> Tensor(a)"""
    return g.reshape(node.args[0], node.shape)


def reshape_as(g: GraphBuilder, node: FxNode) -> Value:
    """reshape_as(Tensor(a) self, Tensor other) -> Tensor(a)"""
    return g.reshape(node.args[0], g.dims(node.args[1]))


def permute(g: GraphBuilder, node: FxNode) -> Value:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    x, axes = node.args
    rank = rank_of(x)
    if not rank:
        return x
    return g.op.Transpose(x, perm=[normalize_axis(a, rank) for a in axes])


def transpose(g: GraphBuilder, node: FxNode) -> Value:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    return swap(g, *node.args)


def t(g: GraphBuilder, node: FxNode) -> Value:
    """t(Tensor(a) self) -> Tensor(a)"""
    return swap(g, node.args[0], 0, -1)


def matrix_transpose(g: GraphBuilder, node: FxNode) -> Value:
    """mT(Tensor(a) self) -> Tensor(a)"""
    return swap(g, node.args[0], -2, -1)


def numpy_t(g: GraphBuilder, node: FxNode) -> Value:
    """numpy_T(Tensor(a) self) -> Tensor(a)"""
    x = node.args[0]
    return g.op.Transpose(x, perm=list(range(rank_of(x)))[::-1]) if rank_of(x) else x


def movedim(g: GraphBuilder, node: FxNode) -> Value:
    """movedim.intlist(Tensor(a) self, int[] source, int[] destination) -> Tensor(a)"""
    x, source, destination = node.args
    rank = rank_of(x)
    if not rank:
        return x
    sources, destinations = normalize_axes(source, rank), normalize_axes(destination, rank)
    order: list[int | None] = [None] * rank
    for a, b in zip(sources, destinations, strict=True):
        order[b] = a
    rest = iter(a for a in range(rank) if a not in sources)
    return g.op.Transpose(x, perm=[next(rest) if a is None else a for a in order])


def expand(g: GraphBuilder, node: FxNode) -> Value:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    x, sizes = node.args[:2]
    return expand_to(g, x, node.shape, sizes)


def expand_as(g: GraphBuilder, node: FxNode) -> Value:
    """expand_as(Tensor(a) self, Tensor other) -> Tensor(a)"""
    x, other = node.args
    return expand_to(g, x, node.shape, g.dims(other))


def broadcast_tensors(g: GraphBuilder, node: FxNode) -> list[Value]:
    """broadcast_tensors(Tensor[] tensors) -> Tensor[]"""
    tensors = node.args[0]
    results = []
    for x, spec in zip(tensors, node.outputs, strict=True):
        assert spec is not None
        rank = len(spec.shape)
        sizes: list[Any] = list(spec.shape)
        for axis in range(rank):
            if isinstance(sizes[axis], int):
                continue
            for other in tensors:
                place = axis - (rank - rank_of(other))
                if place >= 0 and other.shape[place] == sizes[axis]:
                    sizes[axis] = g.dim(other, place)
                    break
        results.append(expand_to(g, x, spec.shape, sizes))
    return results


def unsqueeze_(g: GraphBuilder, node: FxNode) -> Value:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    x, axis = node.args
    return unsqueeze(g, x, axis % (rank_of(x) + 1))


def squeeze_(g: GraphBuilder, node: FxNode) -> Value:
    """squeeze(Tensor(a) self) -> Tensor(a)

    Removes only axes whose size is statically 1, as in torch's traced result.
    """
    x = node.args[0]
    return _squeeze(g, node, x, range(rank_of(x)))


def squeeze_dims(g: GraphBuilder, node: FxNode) -> Value:
    """squeeze.dim(Tensor(a) self, int dim) -> Tensor(a)"""
    x, axes = node.args
    rank = rank_of(x)
    return _squeeze(g, node, x, [normalize_axis(a, rank) for a in ([axes] if isinstance(axes, int) else axes)])


def _squeeze(g: GraphBuilder, node: FxNode, x: Value, axes: Any) -> Value:
    assert x.shape is not None
    gone = [a for a in axes if rank_of(x) and x.shape[a] == 1]
    dynamic = [a for a in axes if rank_of(x) and not isinstance(x.shape[a], int)]
    if rank_of(x) - len(gone) > len(node.shape):  # torch knows some of these sizes to be 1
        absent = [a for a in dynamic if x.shape[a] not in node.shape]
        gone += absent if rank_of(x) - len(gone) - len(absent) == len(node.shape) else dynamic
    if rank_of(x) - len(gone) != len(node.shape):
        raise Unsupported("squeeze of an axis whose size is only known at run time")
    return squeeze(g, x, *gone) if gone else x


def unflatten(g: GraphBuilder, node: FxNode) -> Value:
    """unflatten.int(Tensor(a) self, int dim, SymInt[] sizes) -> Tensor(a)"""
    x, axis, sizes = node.args
    axis = normalize_axis(axis, rank_of(x))
    requested = [*g.dims(x)[:axis], *sizes, *g.dims(x)[axis + 1 :]]
    return g.reshape(x, known_sizes(node, requested))


def diagonal(g: GraphBuilder, node: FxNode) -> Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    return diagonal_of(g, *node.args)


def unfold(g: GraphBuilder, node: FxNode) -> Value:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)

    Windows of one axis: gathered by a matrix of indices, the window's axis moved last.
    """
    x, axis, size, step = node.args
    rank = rank_of(x)
    if not rank:
        # A 0-dim tensor has one window, of one element or of none.
        return g.op.Slice(unsqueeze(g, x, 0), g.const([0]), g.const([size]))
    windows = windows_of(g, x, normalize_axis(axis, rank), size, step)
    axis = normalize_axis(axis, rank)
    order = [a for a in range(rank + 1) if a != axis + 1] + [axis + 1]
    return g.op.Transpose(windows, perm=order)


RULES: list[Rule] = [
    *[
        Rule(f"aten::{name}.default", view)
        for name in ("view", "_unsafe_view", "reshape", "view_copy", "_reshape_alias")
    ],
    Rule("aten::flatten.using_ints", reshape_to_result),
    Rule("aten::ravel.default", reshape_to_result),
    Rule("aten::reshape_as.default", reshape_as),
    Rule("aten::view_as.default", reshape_as),
    Rule("aten::permute.default", permute),
    Rule("aten::permute_copy.default", permute),
    Rule("aten::transpose.int", transpose),
    Rule("aten::swapaxes.default", transpose),
    Rule("aten::swapdims.default", transpose),
    Rule("aten::transpose_copy.int", transpose),
    Rule("aten::t.default", t),
    Rule("aten::mT.default", matrix_transpose),
    Rule("aten::numpy_T.default", numpy_t),
    Rule("aten::movedim.intlist", movedim),
    Rule("aten::movedim.int", movedim),
    Rule("aten::moveaxis.intlist", movedim),
    Rule("aten::moveaxis.int", movedim),
    Rule("aten::expand.default", expand),
    Rule("aten::expand_copy.default", expand),
    Rule("aten::broadcast_to.default", expand),
    Rule("aten::expand_as.default", expand_as),
    Rule("aten::broadcast_tensors.default", broadcast_tensors),
    Rule("aten::unsqueeze.default", unsqueeze_),
    Rule("aten::unsqueeze_copy.default", unsqueeze_),
    Rule("aten::squeeze.default", squeeze_),
    Rule("aten::squeeze.dim", squeeze_dims),
    Rule("aten::squeeze.dims", squeeze_dims),
    Rule("aten::unflatten.int", unflatten),
    Rule("aten::diagonal.default", diagonal),
    Rule("aten::unfold.default", unfold),
    Rule("aten::unfold_copy.default", unfold),
]
