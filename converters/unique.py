"""Unique elements."""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import INT32, INT64
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def unique2(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_unique2(Tensor self, bool sorted=True, bool return_inverse=False, bool return_counts=False) -> (Tensor, Tensor, Tensor)"""
    x = node.args[0]
    inner = computed_in(g, "Unique", node.dtype)
    values, _, inverse, counts = g.op.Unique(g.reshape(g.cast(x, inner), [-1]), sorted=1, _outputs=4)
    return _wanted(g, node, values, g.op.Reshape(inverse, g.shape(x)), counts)


def _wanted(g: GraphBuilder, node: FxNode, values: Value, inverse: Value, counts: Value) -> list[Value]:
    """The three results; torch returns an empty tensor for each that was not requested."""
    empty = g.const(np.zeros(0, dtype=np.int64))
    results = [g.cast(values, node.dtype), inverse, counts]
    return [
        empty if i and s is not None and s.shape == (0,) else r
        for i, (r, s) in enumerate(zip(results, node.outputs, strict=True))
    ]


def unique_dim(g: GraphBuilder, node: FxNode) -> list[Value]:
    """unique_dim(Tensor self, int dim, bool sorted=True, bool return_inverse=False, bool return_counts=False) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    x, axis = node.args[:2]
    inner = computed_in(g, "Unique", node.dtype)
    axis = normalize_axis(axis, rank_of(x))
    values, _, inverse, counts = g.op.Unique(g.cast(x, inner), axis=axis, sorted=1, _outputs=4)
    return [g.cast(values, node.dtype), inverse, counts]


def unique_consecutive(g: GraphBuilder, node: FxNode) -> list[Value]:
    """unique_consecutive(Tensor self, bool return_inverse=False, bool return_counts=False, int? dim=None) -> (Tensor, Tensor, Tensor)

    An element begins a run when it differs from the element before.
    """  # noqa: E501
    x, _, _, axis = node.args
    inner = computed_in(g, "Equal", node.dtype)
    source = g.cast(x, inner)
    if axis is None:
        source, axis = g.reshape(source, [-1]), 0
    axis = normalize_axis(axis, rank_of(source))
    rank = rank_of(source)
    if not rank:
        source, rank = unsqueeze(g, source, 0), 1
    place = np.array([axis])
    after = g.op.Slice(source, np.array([1]), np.array([np.iinfo(np.int64).max]), place)
    before = g.op.Slice(source, np.array([0]), np.array([-1]), place)
    changed = g.cast(g.op.Not(g.op.Equal(after, before)), INT32)
    others = [a for a in range(rank) if a != axis]
    if others:
        changed = reduce(g, "ReduceMax", changed, others, False)
    # The first element begins a run, unless there is none.
    size = g.as_vector(g.dim(source, axis))
    first = g.op.Expand(g.const(1, INT32), g.op.Min(size, g.const([1])))
    starts = g.op.Concat(first, changed, axis=0)
    places = g.op.Squeeze(g.op.NonZero(starts), g.const([0]))
    values = g.op.Gather(source, places, axis=axis)
    inverse = g.op.Sub(g.op.CumSum(g.cast(starts, INT64), g.const(0)), g.const(1))
    ends = g.op.Concat(
        g.op.Slice(places, np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0])), size, axis=0
    )
    ends = g.op.Slice(ends, np.array([0]), g.op.Shape(places), np.array([0]))
    counts = g.op.Sub(ends, places)
    if node.args[3] is None:
        inverse = g.op.Reshape(inverse, g.shape(x))
    return _wanted(g, node, values, inverse, counts)


RULES: list[Rule] = [
    Rule("aten::_unique2.default", unique2),
    Rule("aten::unique_dim.default", unique_dim),
    Rule("aten::unique_consecutive.default", unique_consecutive),
]
