"""Searching in sorted and unsorted sequences."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.converters.helpers.order import count_below
from onnxplug.converters.helpers.promotion import common_dtype, comparable, operand, operands
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def bucketize(g: GraphBuilder, node: FxNode) -> Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    x, edges = node.args[:2]
    dtype = comparable(common_dtype(node, 0, 1))
    found = count_below(g, edges, operand(g, x, dtype), node.args[3], dtype)
    return g.cast(found, node.dtype)


def searchsorted(g: GraphBuilder, node: FxNode) -> Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None) -> Tensor"""  # noqa: E501
    edges, x, _, right, side, sorter = node.args
    if sorter is not None:
        edges = g.op.GatherElements(edges, sorter, axis=-1)
    dtype = comparable(common_dtype(node, 0, 1))
    after = right or side == "right"
    return g.cast(count_below(g, edges, operand(g, x, dtype), after, dtype), node.dtype)


def isin(g: GraphBuilder, node: FxNode) -> Value:
    """isin.Tensor_Tensor(Tensor elements, Tensor test_elements, *, bool assume_unique=False, bool invert=False) -> Tensor"""
    x, tested, _, invert = node.args
    dtype = comparable(common_dtype(node, 0, 1), True)
    a, b = operands(g, x, tested, dtype=dtype)
    same = g.op.Equal(unsqueeze(g, a, rank_of(a)), g.reshape(b, [-1]))
    count = reduce(g, "ReduceSum", g.cast(same, INT64), [rank_of(a)], False)
    found: Value = g.op.Greater(count, g.const(0))
    return g.op.Not(found) if invert else found


RULES: list[Rule] = [
    Rule("aten::bucketize.Tensor", bucketize),
    Rule("aten::bucketize.Scalar", bucketize),
    Rule("aten::searchsorted.Tensor", searchsorted),
    Rule("aten::searchsorted.Scalar", searchsorted),
    *[Rule(f"aten::isin.{overload}", isin) for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")],
]
