"""The weights of antialiased interpolation, whose filter grows with the step between points, as Pillow's.

The formulas are those of ``_compute_weights_aa`` in ATen/native/cpu/UpSampleKernel.cpp. PyTorch computes them in the
tensor's own precision, float32 for half-precision tensors. Where all weights of a point are tiny, they are divided by a
tiny sum, so that the rounding decides the result: each step here has the precision of PyTorch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, INT64
from onnxplug.converters.helpers.filters import computed_filter, filter_of

#: The coefficient of the cubic convolution, Pillow's.
_CUBIC = -0.5
#: Half the width of each filter, in steps between elements.
_REACH = {"linear": 1.0, "cubic": 2.0, "lanczos": 3.0}


def antialiased_weights(
    size: int, out: int, factor: float | None, corners: bool, mode: str, dtype: ir.DataType
) -> np.ndarray:
    """The weight of each element of an axis in each element of the result: [out, size].

    Args:
        size, out: Number of elements before and after. A size that stays is copied, whatever the factor.
        factor: The factor by which coordinates are mapped; ``None``: ``out / size``.
        corners: The first and last elements stay where they are.
        mode: ``"linear"``, ``"cubic"`` or ``"lanczos"``.
        dtype: The precision that the weights are computed in.
    """
    real: Any = dtype.numpy().type
    if size == out:
        return np.eye(size, dtype=real)
    step = _step(size, out, factor, corners, real)
    widening = max(step, real(1))
    reach = real(_REACH[mode]) * widening
    weights = np.zeros((out, size), real)
    for i in range(out):
        center = real(float(step) * (i + 0.5))
        first = max(int(float(center - reach) + 0.5), 0)
        last = min(int(float(center + reach) + 0.5), size)
        places = (np.arange(first, last).astype(real) - center).astype(np.float64) + 0.5
        row = filter_of((places * float(real(1 / float(widening)))).astype(real), mode, _CUBIC)
        # Points beyond the tensor's end have no weights, and PyTorch does not divide by their sum of 0.
        weights[i, first:last] = row / (row.sum() or real(1))
    return weights


def _step(size: int, out: int, factor: float | None, corners: bool, real: Any) -> Any:
    if corners:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1.0 / factor) if factor else real(size) / real(out)


def computed_antialiased_weights(
    g: GraphBuilder, size: Value, out: Value, step: Value, mode: str, dtype: ir.DataType
) -> Value:
    """As :func:`antialiased_weights`, for sizes that are only known at run time, and that differ.

    Args:
        g: The builder.
        size, out: Number of elements before and after: 0-dim, int64.
        step: The distance between points, 0-dim, of ``dtype``.
        mode: ``"linear"``, ``"cubic"`` or ``"lanczos"``.
        dtype: The precision that the weights are computed in.
    """
    op = g.op
    one, half = g.const(1.0, dtype), g.const(0.5, DOUBLE)
    index = unsqueeze(g, g.cast(op.Range(g.const(0), out, g.const(1)), DOUBLE), 1)
    places = unsqueeze(g, op.Range(g.const(0), size, g.const(1)), 0)
    widening = op.Max(step, one)
    center = g.cast(op.Mul(g.cast(step, DOUBLE), op.Add(index, half)), dtype)
    reach = op.Mul(widening, g.const(_REACH[mode], dtype))
    # The conversion to an integer rounds towards zero.
    first, last = (
        g.cast(op.Add(g.cast(end, DOUBLE), half), INT64) for end in (op.Sub(center, reach), op.Add(center, reach))
    )
    inside = op.And(op.GreaterOrEqual(places, first), op.Less(places, last))
    distance = op.Add(g.cast(op.Sub(g.cast(places, dtype), center), DOUBLE), half)
    scaled = g.cast(op.Mul(distance, g.cast(op.Div(one, widening), DOUBLE)), dtype)
    row = op.Where(inside, computed_filter(g, scaled, mode, _CUBIC), g.const(0.0, dtype))
    # Points beyond the tensor's end have no weights, and PyTorch does not divide by their sum of 0.
    total = op.ReduceSum(row, g.const([1]), keepdims=1)
    return op.Div(row, op.Where(op.Equal(total, g.const(0.0, dtype)), one, total))
