"""pyg_lib's products of many matrices: converters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import onnx_ir as ir

from onnxplug import Unsupported

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def segment_matmul(g: Any, node: Any) -> Any:
    """segment_matmul(Tensor input, Tensor ptr, Tensor other) -> Tensor

    Rows ptr[i] to ptr[i + 1] of input [N, K] times other[i] of [B, K, M]: a slice and a product for each segment.
    """
    x, ptr, weights = node.args
    (count,) = g.concrete_shape([g.dim(weights, 0)], "number of segments")
    if not count:
        raise Unsupported("there are no segments at all")
    bounds = g.op.Split(g.cast(ptr, ir.DataType.INT64), [1] * (count + 1), axis=0, _outputs=count + 1)
    parts = [
        _product(g, g.op.Slice(x, start, end, [0]), g.op.Gather(weights, g.const(i), axis=0))
        for i, (start, end) in enumerate(pairwise(bounds))
    ]
    return g.op.Concat(*parts, axis=0)


def grouped_matmul(g: Any, node: Any) -> Any:
    """grouped_matmul(Tensor[] input, Tensor[] other) -> Tensor[]"""
    left, right = node.args
    return [_product(g, x, weight) for x, weight in zip(left, right, strict=True)]


def _product(g: Any, x: Any, weight: Any) -> Any:
    """A matrix product; halves, which ONNX Runtime may not multiply, in float."""
    dtype = x.dtype
    if dtype in _HALVES:
        x, weight = (g.cast(v, ir.DataType.FLOAT) for v in (x, weight))
    return g.cast(g.op.MatMul(x, weight), dtype)
