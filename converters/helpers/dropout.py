"""Random dropout."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import FLOAT, HALVES


def randomly_dropped(g: GraphBuilder, x: Value, p: float) -> tuple[Value, Value]:
    """``x`` with each element zero with probability ``p``, the others scaled up; and which of them are left.

    Not a Dropout: ONNX Runtime's optimiser takes that node out in training mode too.
    """
    dtype = x.dtype
    assert dtype is not None
    inner = FLOAT if dtype in HALVES else dtype
    x = g.cast(x, inner)
    kept = g.op.GreaterOrEqual(g.op.RandomUniformLike(x, dtype=int(FLOAT)), float(p))
    scale = g.op.Where(kept, g.const(1 / (1 - p) if p < 1 else 0.0, inner), g.const(0.0, inner))
    return g.cast(g.op.Mul(x, scale), dtype), kept
