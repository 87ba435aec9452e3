"""Element types by their short names, and the groups of them that converters ask for."""

from __future__ import annotations

import numpy as np
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


def fits_attribute(dtype: ir.DataType | None, *numbers: float) -> bool:
    """Whether an operator on tensors of a dtype may have numbers as attributes, which ONNX keeps in float32.

    PyTorch computes with the same float32 on floats of at most 32 bits; on doubles it computes with the number itself.
    """
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, which is another number
        return dtype != DOUBLE or all(float(np.float32(number)) == number for number in numbers)
