"""Searching in sorted and unsorted sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.converters.helpers.order import count_below, without_nan
from onnxplug.converters.helpers.promotion import common_dtype, operand, operands
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.scattering import scatter_rows
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def bucketize(g: GraphBuilder, node: FxNode) -> Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    x, edges = node.args[:2]
    return g.cast(_places(g, node, edges, x, node.args[3]), node.dtype)


def searchsorted(g: GraphBuilder, node: FxNode) -> Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None) -> Tensor"""  # noqa: E501
    edges, x, _, right, side, sorter = node.args
    if sorter is not None:
        edges = g.op.GatherElements(edges, sorter, axis=-1)
    return g.cast(_places(g, node, edges, x, right or side == "right"), node.dtype)


def _places(g: GraphBuilder, node: FxNode, edges: Value, x: Any, right: bool) -> Value:
    """The places of ``x`` among sorted edges; edges that may hold NaN take a few more nodes."""
    dtype = computed_in(g, "Greater GreaterOrEqual IsNaN", common_dtype(node, 0, 1))
    kept = g.stored(edges)
    if dtype.is_floating_point() and (kept is None or bool(kept.isnan().any())):
        edges = without_nan(g, g.cast(edges, dtype))
    return count_below(g, edges, operand(g, x, dtype), right, dtype)


#: With at most so many elements to test against, all are compared with each.
_FEW = 64


def isin(g: GraphBuilder, node: FxNode) -> Value:
    """isin.Tensor_Tensor(Tensor elements, Tensor test_elements, *, bool assume_unique=False, bool invert=False) -> Tensor

    NaN equals no test element.
    """
    x, tested, _, invert = node.args
    dtype = computed_in(g, "Equal", common_dtype(node, 0, 1))
    a, b = operands(g, x, tested, dtype=dtype)
    b = g.reshape(b, [-1])
    size = g.dim(b, 0)
    few = isinstance(size, int) and size <= _FEW
    contained = _among_few(g, a, b) if few else _among_many(g, a, b)
    return g.op.Not(contained) if invert else contained


def _among_few(g: GraphBuilder, a: Value, b: Value) -> Value:
    """Each element of ``a`` compared with all of ``b``."""
    same = g.op.Equal(unsqueeze(g, a, rank_of(a)), b)
    count = reduce(g, "ReduceSum", g.cast(same, INT64), [rank_of(a)], False)
    return g.op.Greater(count, g.const(0))


def _among_many(g: GraphBuilder, a: Value, b: Value) -> Value:
    """Unique gives equal elements of both tensors the same number; an element is found if its number occurs in ``b``."""
    assert a.dtype is not None
    inner = computed_in(g, "Unique", a.dtype)
    flat = g.reshape(a, [-1])
    both = g.op.Concat(g.cast(flat, inner), g.cast(b, inner), axis=0)
    ordinary: Value | None = None
    if inner.is_floating_point():
        # Unique has no defined order for NaN.
        ordinary = g.op.Not(g.op.IsNaN(both))
        both = g.op.Where(ordinary, both, g.const(0.0, inner))
    _, _, number, counts = g.op.Unique(both, sorted=1, _outputs=4)
    cut = g.op.Shape(flat)
    end, axis = np.array([np.iinfo(np.int64).max]), np.array([0])
    mark = g.op.Expand(g.const(1), g.op.Shape(b))
    if ordinary is not None:
        mark = g.cast(g.op.Slice(ordinary, cut, end, axis), INT64)
    size = g.op.Squeeze(g.op.Shape(counts), g.const([0]))
    marked = scatter_rows(g, mark, g.op.Slice(number, cut, end, axis), size, "sum", INT64)
    contained = g.op.Greater(g.op.Gather(marked, g.op.Slice(number, g.const([0]), cut, axis)), g.const(0))
    if ordinary is not None:
        contained = g.op.And(contained, g.op.Slice(ordinary, g.const([0]), cut, axis))
    return g.op.Reshape(contained, g.shape(a)) if rank_of(a) else squeeze(g, contained, 0)


RULES: list[Rule] = [
    Rule("aten::bucketize.Tensor", bucketize),
    Rule("aten::bucketize.Scalar", bucketize),
    Rule("aten::searchsorted.Tensor", searchsorted),
    Rule("aten::searchsorted.Scalar", searchsorted),
    *[Rule(f"aten::isin.{overload}", isin) for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")],
]
