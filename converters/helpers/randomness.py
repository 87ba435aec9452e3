"""Random numbers in the shape of a tensor, by ONNX's random operators or, where the runtime has none, by a hash."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.grids import iota
from onnxplug.converters.helpers.runtimes import RANDOM_ENDS_AT_21, computed_in

_WORD = 1 << 32


def drawn_in(g: GraphBuilder, dtype: ir.DataType) -> ir.DataType:
    """The dtype to draw in: for integers and bools float."""
    return computed_in(g, "RandomUniformLike RandomNormalLike", dtype if dtype.is_floating_point() else FLOAT)


def uniform_like(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """Numbers from [0, 1) in the shape of ``x``."""
    if _is_hashed(g):
        return _hashed(g, x, dtype)
    shaped = g.cast(x, dtype)
    return g.op.RandomUniformLike(shaped, dtype=int(dtype))


def normal_like(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """Standard normal numbers of the shape of ``x``."""
    if not _is_hashed(g):
        return g.op.RandomNormalLike(g.cast(x, dtype), dtype=int(dtype))
    # Box and Muller, 1958: the radius from one number, the angle from another.
    first, second = _hashed(g, x, dtype), _hashed(g, x, dtype)
    radius = g.op.Sqrt(g.op.Mul(g.op.Log(g.op.Sub(g.const(1.0, dtype), first)), g.const(-2.0, dtype)))
    return g.op.Mul(radius, g.op.Cos(g.op.Mul(second, g.const(2 * math.pi, dtype))))


def _is_hashed(g: GraphBuilder) -> bool:
    return g.opset >= 22 and RANDOM_ENDS_AT_21.concerns(g)


def _hashed(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """As :func:`uniform_like`: the place of each element hashed with the bits of a random mask.

    Integers of 32 bits are computed in int64, where no product overflows. For a given mask the hash is one to one, so that no
    number of a draw repeats by construction. A float has 24 random bits, a double 53 of two hashes.
    """
    words = _random_words(g, 2 if dtype != DOUBLE else 3)
    place = g.op.Reshape(iota(g, g.op.Size(x)), g.shape(x))
    number = _mixed(g, g.op.BitwiseXor(_mixed(g, g.op.Mod(g.op.Add(place, words[0]), g.const(_WORD))), words[1]))
    if dtype != DOUBLE:
        high = g.cast(g.op.Div(number, g.const(1 << 8)), FLOAT)
        return g.cast(g.op.Mul(high, g.const(2.0**-24, FLOAT)), dtype)
    rest = g.op.Div(_mixed(g, g.op.BitwiseXor(number, words[2])), g.const(1 << 11))
    whole = g.op.Add(g.op.Mul(number, g.const(1 << 21)), rest)
    return g.op.Mul(g.cast(whole, DOUBLE), g.const(2.0**-53, DOUBLE))


#: Numbers of a mask that are not used. ONNX Runtime seeds a linear congruential generator anew for each mask, by a counter: the
#: first numbers of successive masks hardly differ.
_SKIPPED = 16


def _random_words(g: GraphBuilder, count: int) -> Sequence[Value]:
    """Random integers of 32 bits, from the mask of a Dropout in training mode; different at each run."""
    ones = g.const(np.ones(_SKIPPED + 32 * count, dtype=np.float32))
    _, mask = g.op.Dropout(ones, 0.5, True, _outputs=2)
    bits = np.zeros((_SKIPPED + 32 * count, count))
    for word in range(count):
        bits[_SKIPPED + 32 * word : _SKIPPED + 32 * (word + 1), word] = 2.0 ** np.arange(32)
    sums = g.cast(g.op.MatMul(g.cast(mask, DOUBLE), g.const(bits, DOUBLE)), INT64)
    return [g.op.Gather(sums, g.const(word)) for word in range(count)]


def _mixed(g: GraphBuilder, number: Value) -> Value:
    """A one-to-one hash of integers from [0, 2³²): shifts and odd factors below 2³¹ in turn."""
    for shift, factor in ((16, 0x2C1B3C6D), (12, 0x297A2D39)):
        number = g.op.BitwiseXor(number, g.op.Div(number, g.const(1 << shift)))
        number = g.op.Mod(g.op.Mul(number, g.const(factor)), g.const(_WORD))
    return g.op.BitwiseXor(number, g.op.Div(number, g.const(1 << 15)))
