"""Conversion between dtypes, with torch's rules for numbers out of range."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import SINCE
from onnxplug.converters.helpers.dtypes import FLOAT, INT64
from onnxplug.converters.helpers.runtimes import INFINITY_IS_LOST
from onnxplug.errors import Unsupported

_SMALL = frozenset({ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT16})
_EIGHT_BITS = frozenset(
    {
        ir.DataType.FLOAT8E4M3FN,
        ir.DataType.FLOAT8E4M3FNUZ,
        ir.DataType.FLOAT8E5M2,
        ir.DataType.FLOAT8E5M2FNUZ,
    }
)


def _to_eight_bits(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """An 8-bit float: e4m3fn saturates in torch, the others overflow to infinity or NaN."""
    if g.opset < SINCE[dtype]:
        raise Unsupported(
            f"{dtype.name.lower()} below opset {SINCE[dtype]}", hint=f"Export for opset {SINCE[dtype]} or later."
        )
    lost = dtype == ir.DataType.FLOAT8E5M2 and INFINITY_IS_LOST.concerns(g)
    if lost and x.dtype is not None and x.dtype.is_floating_point():
        x = g.cast(x, FLOAT)
        x = g.op.Where(g.op.GreaterOrEqual(g.op.Abs(x), 61440.0), g.op.Mul(x, float("inf")), x)
    return g.op.Cast(x, to=int(dtype), saturate=int(dtype == ir.DataType.FLOAT8E4M3FN))


def convert_dtype(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """``x`` in another dtype. Floats reach small integers through int64: out of range they wrap, as torch's do."""
    if dtype in _EIGHT_BITS and x.dtype != dtype:
        return _to_eight_bits(g, x, dtype)
    if x.dtype is not None and x.dtype.is_floating_point() and dtype in _SMALL:
        return g.cast(g.cast(x, INT64), dtype)
    return g.cast(x, dtype)
