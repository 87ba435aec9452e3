"""Element types by their short names, and the groups of them that converters ask for."""

from __future__ import annotations

import onnx_ir as ir

BOOL = ir.DataType.BOOL
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
FLOAT16 = ir.DataType.FLOAT16
FLOAT = ir.DataType.FLOAT
DOUBLE = ir.DataType.DOUBLE

#: Floats of 16 bits. ONNX Runtime's CPU kernels compute most operators in float instead.
HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
#: Integers that ONNX Runtime has arithmetic for.
WIDE_INTEGERS = frozenset({INT32, INT64})
