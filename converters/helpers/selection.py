"""Selection between two tensors, for every dtype."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, HALVES, INT32
from onnxplug.converters.helpers.promotion import operands_in


def select(g: GraphBuilder, condition: Value, x: Any, y: Any, dtype: ir.DataType) -> Value:
    """``Where`` in a dtype for which ONNX Runtime has it: bools by logic, dtypes without a kernel in a wider one."""
    condition = g.cast(condition, BOOL)
    inner = dtype
    if dtype == BOOL:
        inner = ir.DataType.UINT8
    elif dtype in (ir.DataType.INT8, ir.DataType.INT16):
        inner = INT32
    elif dtype in HALVES:
        inner = FLOAT if dtype == ir.DataType.BFLOAT16 else dtype
    a, b = operands_in(g, x, y, dtype=dtype, inner=inner)
    return g.cast(g.op.Where(condition, a, b), dtype)
