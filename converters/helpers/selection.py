"""Selection between two tensors, for every dtype."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import BOOL
from onnxplug.converters.helpers.promotion import operands_in
from onnxplug.converters.helpers.runtimes import computed_in


def select(g: GraphBuilder, condition: Value, x: Any, y: Any, dtype: ir.DataType) -> Value:
    """``Where``, in a wider dtype where there is no kernel."""
    condition = g.cast(condition, BOOL)
    a, b = operands_in(g, x, y, dtype=dtype, inner=computed_in(g, "Where", dtype))
    return g.cast(g.op.Where(condition, a, b), dtype)
