"""Integers: bits, shifts, common divisors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx_ir import DataType, Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, FLOAT, INT64
from onnxplug.converters.helpers.promotion import operands, operands_in
from onnxplug.converters.helpers.reductions import reduce, reduced
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_Multiple = Callable[[GraphBuilder, Value, Value], Value]
#: Powers of two that a signed 64-bit integer holds, and the power that wraps.
_POWERS = np.array([1 << i for i in range(63)] + [-(1 << 63)], dtype=np.int64)
#: Element types of one BitShift. ONNX Runtime has no kernel for 16 bits, which products and quotients serve as well.
_BIT_SHIFTED = frozenset({DataType.UINT8, DataType.UINT32, DataType.UINT64})


def bitwise(op_type: str) -> Converter:
    """bitwise_and, bitwise_or, bitwise_xor: And, Or, Xor for bools; ONNX has them for integers since opset 18."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args[:2]
        dtype = BOOL if node.dtype == BOOL else node.dtype
        a, b = operands(g, x, y, dtype=dtype)
        return getattr(g.op, op_type if dtype == BOOL else f"Bitwise{op_type}")(a, b)

    convert.__name__ = convert.__qualname__ = f"bitwise_{op_type.lower()}"
    return convert


def bitwise_by_bits(op_type: str) -> Converter:
    """The same before opset 18: bit by bit, then the sum of the powers of two of the result."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args[:2]
        if node.dtype == BOOL:
            return getattr(g.op, op_type)(*operands(g, x, y, dtype=BOOL))
        a, b = (_bits(g, v) for v in operands(g, x, y, dtype=INT64))
        bits = g.cast(getattr(g.op, op_type)(a, b), INT64)
        total = reduced(g, "ReduceSum", g.op.Mul(bits, g.const(_POWERS)), -1, False, INT64, exact=True)
        return g.cast(total, node.dtype)

    convert.__name__ = convert.__qualname__ = f"bitwise_{op_type.lower()}_by_bits"
    return convert


def _bits(g: GraphBuilder, x: Value) -> Value:
    """The 64 bits of an integer along a new last axis, the lowest first."""
    column = unsqueeze(g, x, rank_of(x))
    shifted = _shifted_right(g, column, g.const(np.arange(64, dtype=np.int64)))
    return g.cast(g.op.Mod(shifted, g.const(2)), BOOL)


def _shifted_right(g: GraphBuilder, x: Value, count: Value) -> Value:
    """x >> count of 64-bit integers, count from 0 to 63: the quotient rounded down, as in two's complement."""
    negative = g.op.Less(x, g.const(0))
    flipped = g.op.Where(negative, g.op.Sub(g.const(-1), x), x)
    power = g.op.Gather(g.const(np.append(_POWERS[:63], np.iinfo(np.int64).max)), count, axis=0)
    # A shift by 63 gives 0: the numbers are not negative here, and only 2**63 - 1 has a quotient of 1.
    quotient = g.op.Where(g.op.Equal(count, g.const(63)), g.const(0), g.op.Div(flipped, power))
    return g.op.Where(negative, g.op.Sub(g.const(-1), quotient), quotient)


def bitwise_not(g: GraphBuilder, node: FxNode) -> Value:
    """bitwise_not(Tensor self) -> Tensor"""
    x = node.args[0]
    return g.op.Not(x) if node.dtype == BOOL else g.op.BitwiseNot(x)


def bitwise_not_by_difference(g: GraphBuilder, node: FxNode) -> Value:
    """bitwise_not(Tensor self) -> Tensor

    For an integer x the result is -x - 1.
    """
    x = node.args[0]
    return g.op.Not(x) if node.dtype == BOOL else compute(g, "Sub", node.dtype, -1, x)


def bitwise_left_shift(g: GraphBuilder, node: FxNode) -> Value:
    """bitwise_left_shift.Tensor(Tensor self, Tensor other) -> Tensor

    A count that is negative, or not less than the width, shifts every bit out.
    """
    counts = _constant_counts(g, node)
    return _shifted(g, node, left=True) if counts is None else _left_by_constants(g, node.args[0], counts, node.dtype)


def right_shift(multiple: _Multiple) -> Converter:
    """bitwise_right_shift: a count that is negative, or not less than the width, shifts every bit out but the sign.

    Args:
        multiple: Rounds an integer down to a multiple of a power of two.
    """

    def bitwise_right_shift(g: GraphBuilder, node: FxNode) -> Value:
        x, dtype, counts, result = node.args[0], node.dtype, _constant_counts(g, node), None
        if counts is not None and dtype.is_signed():
            result = _right_by_constants(g, x, counts, dtype, multiple)
        elif counts is not None:
            result = _unsigned_right_by_constants(g, x, counts, dtype)
        return result if result is not None else _shifted(g, node, left=False)

    return bitwise_right_shift


def _shifted(g: GraphBuilder, node: FxNode, left: bool) -> Value:
    """A shift by any counts, by 64-bit integers."""
    dtype = node.dtype
    x, count = operands(g, *node.args[:2], dtype=INT64)
    outside = g.op.Or(g.op.Less(count, g.const(0)), g.op.GreaterOrEqual(count, g.const(dtype.bitwidth)))
    in_range = g.op.Where(outside, g.const(0), count)
    if left:
        power = g.op.Gather(g.const(_POWERS), in_range, axis=0)
        result = g.op.Where(outside, g.const(0), g.op.Mul(x, power))
    else:
        gone = g.op.Where(g.op.Less(x, g.const(0)), g.const(-1), g.const(0))
        result = g.op.Where(outside, gone, _shifted_right(g, x, in_range))
    return g.cast(result, dtype)


def _constant_counts(g: GraphBuilder, node: FxNode) -> np.ndarray | None:
    """The counts of a shift, where they are known."""
    count = node.args[1]
    known = g.constant(count) if isinstance(count, Value) else np.array(count)
    return known.astype(np.int64) if known is not None and known.dtype.kind in "iu" else None


def _left_by_constants(g: GraphBuilder, x: Any, counts: np.ndarray, dtype: DataType) -> Value:
    """A BitShift, or a product with powers of two that wraps; the power is 0 where every bit is shifted out."""
    within = (counts >= 0) & (counts < dtype.bitwidth)
    if dtype in _BIT_SHIFTED and within.all():
        first, second = operands(g, x, counts, dtype=dtype)
        return g.op.BitShift(first, second, direction="LEFT")
    return compute(g, "Mul", dtype, x, np.where(within, _POWERS[counts % 64], 0))


def _unsigned_right_by_constants(g: GraphBuilder, x: Any, counts: np.ndarray, dtype: DataType) -> Value | None:
    """A BitShift, or the quotient by powers of two; ``None`` where every bit is shifted out."""
    if not ((counts >= 0) & (counts < dtype.bitwidth)).all():
        return None
    if dtype not in _BIT_SHIFTED:
        return compute(g, "Div", dtype, x, _POWERS[counts])
    first, second = operands(g, x, counts, dtype=dtype)
    return g.op.BitShift(first, second, direction="RIGHT")


def _right_by_constants(
    g: GraphBuilder, x: Any, counts: np.ndarray, dtype: DataType, multiple: _Multiple
) -> Value | None:
    """The quotient of an exact division by powers of two; ``None`` where only some of them exceed the dtype."""
    # Where every bit is shifted out the sign stays, as if all bits but one were.
    counts = np.where((counts >= 0) & (counts < dtype.bitwidth), counts, dtype.bitwidth - 1)
    inner = computed_in(g, "Div", dtype)
    (number,) = operands_in(g, x, dtype=dtype, inner=inner)
    if (counts < inner.bitwidth - 1).all():
        power = g.const(_POWERS[counts], inner)
        return g.cast(g.op.Div(multiple(g, number, power), power), dtype)
    if counts.size > 1:
        return None
    zero = g.const(0, inner)
    return g.cast(g.op.Where(g.op.Less(number, zero), g.const(-1, inner), zero), dtype)


def _without_bits(g: GraphBuilder, x: Value, power: Value) -> Value:
    """An integer without the bits below a power of two."""
    return g.op.BitwiseAnd(x, g.op.Neg(power))


def _without_rest(g: GraphBuilder, x: Value, power: Value) -> Value:
    """The same before opset 18."""
    return g.op.Sub(x, g.op.Mod(x, power))


def gcd(g: GraphBuilder, node: FxNode) -> Value:
    """gcd(Tensor self, Tensor other) -> Tensor

    Euclid's algorithm, elementwise, until every remainder is 0.
    """
    x, y = operands(g, *node.args, dtype=INT64)
    shape = g.op.Shape(g.op.Add(x, y))
    a, b = (g.op.Expand(g.op.Abs(v), shape) for v in (x, y))
    dims: Any = list(node.shape)

    def body(number: Value, going: Value, first: Value, second: Value) -> list[Value]:
        finished = g.op.Equal(second, g.const(0))
        divisor = g.op.Where(finished, g.const(1), second)
        rest = g.op.Where(finished, g.const(0), g.op.Mod(first, divisor))
        following = g.op.Where(finished, first, second)
        left = g.cast(g.op.Greater(rest, g.const(0)), FLOAT)
        return [g.cast(reduce(g, "ReduceMax", left, None, False), BOOL), following, rest]

    graph = g.subgraph(body, [(INT64, ()), (BOOL, ()), (INT64, dims), (INT64, dims)], name="euclid")
    # One more round than needed turns the last divisor into the result.
    a, b = g.op.Loop(None, g.const(True), a, b, body=graph, _outputs=2)
    result = g.op.Where(g.op.Equal(b, g.const(0)), a, b)
    return g.cast(result, node.dtype)


def _both(name: str, converter: Converter, since: int | None = None, until: int | None = None) -> list[Rule]:
    return [Rule(f"aten::{name}.{overload}", converter, opset=(since, until)) for overload in ("Tensor", "Scalar")]


_LOGIC = {"and": "And", "or": "Or", "xor": "Xor"}
_SHIFTS: list[tuple[str, Converter, int | None, int | None]] = [
    ("left", bitwise_left_shift, None, None),
    ("right", right_shift(_without_bits), 18, None),
    ("right", right_shift(_without_rest), None, 17),
]
RULES: list[Rule] = [
    *[rule for name, op in _LOGIC.items() for rule in _both(f"bitwise_{name}", bitwise(op), 18)],
    *[rule for name, op in _LOGIC.items() for rule in _both(f"__{name}__", bitwise(op), 18)],
    *[rule for name, op in _LOGIC.items() for rule in _both(f"bitwise_{name}", bitwise_by_bits(op), None, 17)],
    *[rule for name, op in _LOGIC.items() for rule in _both(f"__{name}__", bitwise_by_bits(op), None, 17)],
    *[Rule(f"aten::bitwise_{name}.Scalar_Tensor", bitwise(op), opset=(18, None)) for name, op in _LOGIC.items()],
    *[
        Rule(f"aten::bitwise_{name}.Scalar_Tensor", bitwise_by_bits(op), opset=(None, 17))
        for name, op in _LOGIC.items()
    ],
    Rule("aten::bitwise_not.default", bitwise_not, opset=(18, None)),
    Rule("aten::bitwise_not.default", bitwise_not_by_difference, opset=(None, 17)),
    *[
        Rule(f"aten::bitwise_{side}_shift.{overload}", converter, opset=(since, until))
        for side, converter, since, until in _SHIFTS
        for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ],
    *[
        rule
        for side, converter, since, until in _SHIFTS
        for rule in _both(f"__{side[0]}shift__", converter, since, until)
    ],
    Rule("aten::gcd.default", gcd),
]
