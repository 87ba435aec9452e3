"""Arithmetic in the dtype of the result, or in a wider dtype where the operator or its kernel does not take it."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, FLOAT16, HALVES, INT64
from onnxplug.converters.helpers.promotion import operands, operands_in
from onnxplug.converters.helpers.runtimes import LOW_HALVES_ARE_SIGNED, computed_in

#: The comparison that tells whether the first of two integers is the result.
_COMPARED = {"Max": "Greater", "Min": "Less"}


def compute(g: GraphBuilder, op_type: str, dtype: ir.DataType, *args: Any) -> Value:
    """An arithmetic node. Integers without a kernel are computed in a wider dtype and wrap back."""
    if dtype == BOOL:
        logical = {"Add": "Or", "Max": "Or", "Mul": "And", "Min": "And"}[op_type]
        return getattr(g.op, logical)(*operands(g, *args, dtype=BOOL))
    inner = computed_in(g, op_type, dtype)
    if op_type in _COMPARED and inner == INT64 and LOW_HALVES_ARE_SIGNED.concerns(g):
        a, b = operands_in(g, *args, dtype=dtype, inner=inner) if inner != dtype else operands(g, *args, dtype=dtype)
        return g.cast(g.op.Where(getattr(g.op, _COMPARED[op_type])(a, b), a, b), dtype)
    if inner != dtype:
        return g.cast(getattr(g.op, op_type)(*operands_in(g, *args, dtype=dtype, inner=inner)), dtype)
    if op_type in ("Mul", "Div") and dtype in HALVES and not _holds(g, dtype, args[-1]):
        # torch multiplies by a number, and divides by it, in float32.
        return g.cast(getattr(g.op, op_type)(*operands(g, *args, dtype=FLOAT)), dtype)
    return getattr(g.op, op_type)(*operands(g, *args, dtype=dtype))


def _holds(g: GraphBuilder, dtype: ir.DataType, x: Any) -> bool:
    """Whether a dtype of 16 bits holds an operand: a tensor, or a number in the range of the dtype's full precision.

    A 0-dim tensor of a dtype that is not promoted is a number too; of a number that only a run gives nothing is known.
    """
    number: Any = x
    if isinstance(x, Value):
        if x.dtype == dtype or x.shape is None or len(x.shape):
            return True
        number = g.constant(x)
        if number is None:
            return False
    return dtype != FLOAT16 or not 0 < abs(number) < math.inf or 2.0**-14 <= abs(number) <= 65504


def truncated(g: GraphBuilder, x: Value) -> Value:
    """A float rounded towards zero. ``-0.5`` gives ``-0.0``, as in torch."""
    return g.op.Mul(g.op.Sign(x), g.op.Floor(g.op.Abs(x)))
