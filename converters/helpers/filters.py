"""The filters of linear, cubic and Lanczos interpolation: a weight for each distance, in steps between elements."""

from __future__ import annotations

import math

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder


def filter_of(x: np.ndarray, mode: str, a: float) -> np.ndarray:
    """The weights at distances ``x``, in their dtype.

    Args:
        x: Distances, of any shape.
        mode: ``"linear"`` for the triangle, ``"cubic"`` for Keys' cubic convolution (1981), ``"lanczos"`` for the product of
            sinc and the sinc of a third of the distance.
        a: The coefficient of the cubic convolution.
    """
    x = np.abs(x)
    if mode == "linear":
        return np.maximum(1 - x, 0)
    real = x.dtype.type
    if mode == "lanczos":
        return np.where(x < 3, np.sinc(x) * np.sinc(x / real(3)), real(0)).astype(x.dtype)
    near = (real(a + 2) * x - real(a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * real(a)
    return np.where(x <= 1, near, np.where(x < 2, far, real(0)))


def computed_filter(g: GraphBuilder, x: Value, mode: str, a: float) -> Value:
    """As :func:`filter_of`, of distances that are only known at run time."""
    op, dtype = g.op, x.dtype
    assert dtype is not None

    def number(value: float) -> Value:
        return g.const(value, dtype)

    x = op.Abs(x)
    if mode == "linear":
        return op.Max(op.Sub(number(1.0), x), number(0.0))
    if mode == "lanczos":
        angle = op.Mul(x, number(math.pi))
        third = op.Div(angle, number(3.0))
        center = op.Equal(x, number(0.0))
        below = op.Where(center, number(1.0), op.Mul(angle, third))
        inside = op.Where(center, number(1.0), op.Div(op.Mul(op.Sin(angle), op.Sin(third)), below))
        return op.Where(op.Less(x, number(3.0)), inside, number(0.0))
    near = op.Mul(op.Mul(op.Sub(op.Mul(x, number(a + 2)), number(a + 3)), x), x)
    near = op.Add(near, number(1.0))
    far = op.Mul(op.Sub(op.Mul(op.Add(op.Mul(op.Sub(x, number(5.0)), x), number(8.0)), x), number(4.0)), number(a))
    far = op.Where(op.Less(x, number(2.0)), far, number(0.0))
    result = op.Where(op.LessOrEqual(x, number(1.0)), near, far)
    return result
