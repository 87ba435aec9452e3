"""Reading by index: gather, take, advanced indexing, embedding."""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.distances import norm_of_difference
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.indices import index_tensors, join_indices
from onnxplug.converters.helpers.runtimes import has_kernel
from onnxplug.converters.helpers.scattering import scatter_rows
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def gather(g: GraphBuilder, node: FxNode) -> Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    x, axis, index = node.args[:3]
    if not rank_of(x):
        return g.reshape(x, []) if not rank_of(index) else g.op.Expand(x, g.shape(index))
    if not rank_of(index):
        return squeeze(g, g.op.GatherElements(x, unsqueeze(g, index, 0), axis=0), 0)
    return g.op.GatherElements(x, index, axis=normalize_axis(axis, rank_of(x)))


def index_select(g: GraphBuilder, node: FxNode) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    x, axis, index = node.args
    if not rank_of(x):
        return x
    if not rank_of(index):
        index = unsqueeze(g, index, 0)
    return g.op.Gather(x, index, axis=normalize_axis(axis, rank_of(x)))


def embedding(g: GraphBuilder, node: FxNode) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"""  # noqa: E501
    return g.op.Gather(node.args[0], node.args[1], axis=0)


def embedding_renorm(g: GraphBuilder, node: FxNode) -> Value:
    """embedding_renorm(Tensor self, Tensor indices, float max_norm, float norm_type) -> Tensor

    Indexed rows whose norm is too large are scaled to the largest norm allowed; torch adds 1e-7 to the norm that it
    divides by.
    """
    table, indices, largest, order = node.args
    dtype = node.dtype
    norms = norm_of_difference(g, table, float(order), 1)
    factor = g.op.Div(g.const(float(largest), dtype), g.op.Add(norms, g.const(1e-7, dtype)))
    named = g.reshape(g.cast(indices, INT64), [-1])
    ones = g.op.Expand(g.const(1), g.op.Shape(named))
    some = g.op.Greater(scatter_rows(g, ones, named, g.as_scalar(g.dim(table, 0)), "sum", INT64), g.const(0))
    scaled = g.op.And(some, g.op.Greater(norms, g.const(float(largest), dtype)))
    return g.op.Mul(table, unsqueeze(g, g.op.Where(scaled, factor, g.const(1.0, dtype)), 1))


def take(g: GraphBuilder, node: FxNode) -> Value:
    """take(Tensor self, Tensor index) -> Tensor"""
    x, index = node.args
    return g.op.Gather(g.reshape(x, [-1]), index, axis=0)


def nonzero(g: GraphBuilder, node: FxNode) -> Value:
    """nonzero(Tensor self) -> Tensor"""
    x = node.args[0]
    if not rank_of(x):
        coordinates = _nonzero(g, unsqueeze(g, x, 0))
        return slice_columns(g, g.op.Transpose(coordinates, perm=[1, 0]))
    return g.op.Transpose(_nonzero(g, x), perm=[1, 0])


def _nonzero(g: GraphBuilder, x: Value) -> Value:
    assert x.dtype is not None
    return g.op.NonZero(x if has_kernel(g, "NonZero", x.dtype) else g.cast(x, BOOL))


def nonzero_static(g: GraphBuilder, node: FxNode) -> Value:
    """nonzero_static(Tensor self, *, SymInt size, int fill_value=-1) -> Tensor

    ``size`` indices: additional indices are dropped, missing indices are filled with ``fill_value``.
    """
    x, size, fill = node.args
    rank = rank_of(x)
    if not rank:
        return g.op.Expand(g.const(fill), g.vector([size, 0]))
    places = g.op.Transpose(_nonzero(g, x), perm=[1, 0])
    rest = g.op.Expand(g.const(fill), g.vector([size, rank]))
    return g.op.Slice(g.op.Concat(places, rest, axis=0), np.array([0]), g.as_vector(size), np.array([0]))


def slice_columns(g: GraphBuilder, x: Value) -> Value:
    """A matrix without its columns: [rows, 0]."""
    return g.op.Slice(x, np.array([0]), np.array([0]), np.array([1]))


def masked_select(g: GraphBuilder, node: FxNode) -> Value:
    """masked_select(Tensor self, Tensor mask) -> Tensor"""
    x, mask = node.args
    shape = g.op.Shape(g.op.Or(mask, g.op.Expand(g.const(False), g.shape(x)))) if rank_of(x) else g.op.Shape(mask)
    flat = g.reshape(g.op.Expand(x, shape), [-1])
    return g.op.Compress(flat, g.reshape(g.op.Expand(mask, shape), [-1]), axis=0)


def one_hot(g: GraphBuilder, node: FxNode) -> Value:
    """one_hot(Tensor self, int num_classes=-1) -> Tensor"""
    x, classes = node.args
    if not isinstance(classes, int) or classes < 0:
        raise Unsupported("one_hot without num_classes: the number of classes would depend on the values")
    if not rank_of(x):
        return squeeze(g, g.op.OneHot(unsqueeze(g, x, 0), g.const(classes), g.const([0, 1]), axis=-1), 0)
    return g.op.OneHot(x, g.const(classes), g.const([0, 1]), axis=-1)


def index(g: GraphBuilder, node: FxNode) -> Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor

    numpy's advanced indexing. One index tensor is a Gather; several broadcast against each other and become a GatherND of
    the indexed axes, moved to the front; the result's new axes take the place of the first index if the indices are
    adjacent, else they come first.
    """
    x, indices = node.args
    axes, tensors = index_tensors(g, x, indices)
    if not axes:
        return x
    if len(axes) == 1:
        return g.op.Gather(x, tensors[0], axis=axes[0])
    rank = rank_of(x)
    others = [a for a in range(rank) if a not in axes]
    moved = g.op.Transpose(x, perm=[*axes, *others])
    joined, new_rank = join_indices(g, tensors)
    picked = g.op.GatherND(moved, joined)
    if axes != list(range(axes[0], axes[-1] + 1)) or axes[0] == 0:
        return picked
    before = axes[0]
    order = [*range(new_rank, new_rank + before), *range(new_rank), *range(new_rank + before, new_rank + len(others))]
    result = g.op.Transpose(picked, perm=order)
    return result


RULES: list[Rule] = [
    Rule("aten::gather.default", gather),
    Rule("aten::index_select.default", index_select),
    Rule("aten::embedding.default", embedding),
    Rule("aten::embedding_renorm.default", embedding_renorm),
    Rule("aten::take.default", take),
    Rule("aten::nonzero.default", nonzero),
    Rule("aten::argwhere.default", nonzero),
    Rule("aten::nonzero_static.default", nonzero_static),
    Rule("aten::masked_select.default", masked_select),
    Rule("aten::one_hot.default", one_hot),
    Rule("aten::index.Tensor", index),
    Rule("aten::_unsafe_index.Tensor", index),
]
