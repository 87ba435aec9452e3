"""Element types by their short names, and the groups of them that converters ask for."""

from __future__ import annotations

import onnx_ir as ir

BOOL = ir.DataType.BOOL
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
FLOAT16 = ir.DataType.FLOAT16
FLOAT = ir.DataType.FLOAT
DOUBLE = ir.DataType.DOUBLE

#: Floats of 16 bits.
HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
#: Integers that are as wide in torch as in ONNX's arithmetic.
WIDE_INTEGERS = frozenset({INT32, INT64})
