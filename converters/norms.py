"""Norms of vectors."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axes, rank_of
from onnxplug.converters.helpers.exactness import SKIPS_NAN
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import reduce, reduced
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def vector_norm(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    x, order, axes, keepdim = node.args[:4]
    return _norm(g, g.cast(x, wide(node.dtype)), order, axes, keepdim, node.dtype)


def extreme_norm_exact(g: GraphBuilder, node: FxNode) -> Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor

    The largest or smallest magnitude, for the orders inf and -inf; NaN propagates.
    """
    named = node.kwargs
    size = g.op.Abs(g.cast(node.args[0], wide(node.dtype)))
    op_type = "ReduceMax" if node.args[1] > 0 else "ReduceMin"
    return reduced(g, op_type, size, named.get("dim"), named.get("keepdim", False), node.dtype, exact=True)


def _is_extreme(node: FxNode) -> bool:
    order = node.args[1]
    return isinstance(order, float) and math.isinf(order)


def norm(g: GraphBuilder, node: FxNode) -> Value:
    """norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor"""
    named = node.kwargs
    order = named.get("p", 2)
    x = g.cast(node.args[0], wide(node.dtype))
    return _norm(g, x, 2 if order is None else order, named.get("dim"), named.get("keepdim", False), node.dtype)


def _norm(g: GraphBuilder, x: Value, order: float, axes: Any, keepdim: bool, dtype: ir.DataType) -> Value:
    rank = rank_of(x)
    over = normalize_axes(axes, rank) if rank else None
    size = g.op.Abs(x)
    kind = x.dtype
    assert kind is not None
    if order == float("inf"):
        result = reduced(g, "ReduceMax", size, over, keepdim, kind)
    elif order == float("-inf"):
        result = reduced(g, "ReduceMin", size, over, keepdim, kind)
    elif order == 0:
        nonzero = g.cast(g.op.Not(g.op.Equal(x, g.const(0.0, kind))), kind)
        result = reduce(g, "ReduceSum", nonzero, over, keepdim)
    elif order == 1:
        result = reduce(g, "ReduceSum", size, over, keepdim)
    elif order == 2:
        # ONNX Runtime's ReduceL2 overflows where the sum of squares does, as torch's norm.
        result = g.op.Sqrt(reduce(g, "ReduceSum", g.op.Mul(x, x), over, keepdim))
    else:
        powers = g.op.Pow(size, g.const(float(order), kind))
        result = g.op.Pow(reduce(g, "ReduceSum", powers, over, keepdim), g.const(1.0 / order, kind))
    return g.cast(result, dtype)


RULES: list[Rule] = [
    Rule("aten::linalg_vector_norm.default", vector_norm),
    Rule("aten::norm.ScalarOpt_dim", norm),
    Rule("aten::norm.ScalarOpt_dim_dtype", norm),
    Rule("aten::norm.Scalar", norm),
    *[
        Rule(f"aten::{op}", extreme_norm_exact, when=_is_extreme, **SKIPS_NAN)
        for op in ("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar")
    ],
]
