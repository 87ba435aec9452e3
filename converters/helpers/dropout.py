"""Random dropout."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import FLOAT
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.randomness import uniform_like
from onnxplug.converters.helpers.runtimes import DROPOUT_IS_REMOVED


def randomly_dropped(g: GraphBuilder, x: Value, p: float) -> tuple[Value, Value]:
    """``x`` with elements set to zero with probability ``p`` and the others scaled up; and a mask of the others."""
    if not DROPOUT_IS_REMOVED.concerns(g) and p < 1:  # 1 is out of the range that the node accepts
        values, kept = g.op.Dropout(x, float(p), True, _outputs=2)
        return values, kept
    dtype = x.dtype
    assert dtype is not None
    inner = wide(dtype)
    x = g.cast(x, inner)
    kept = g.op.GreaterOrEqual(uniform_like(g, x, FLOAT), float(p))
    scale = g.op.Where(kept, g.const(1 / (1 - p) if p < 1 else 0.0, inner), g.const(0.0, inner))
    return g.cast(g.op.Mul(x, scale), dtype), kept
