"""Integers: bits, shifts, common divisors."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.promotion import operands
from onnxplug.converters.helpers.reductions import reduce, reduced
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

#: Powers of two that a signed 64-bit integer holds, and the power that wraps.
_POWERS = np.array([1 << i for i in range(63)] + [-(1 << 63)], dtype=np.int64)


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


def shift(left: bool) -> Converter:
    """bitwise_left_shift, bitwise_right_shift: a count that is negative, or not less than the width, shifts every bit out."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = node.dtype
        x, count = operands(g, *node.args[:2], dtype=INT64)
        width = dtype.bitwidth
        outside = g.op.Or(g.op.Less(count, g.const(0)), g.op.GreaterOrEqual(count, g.const(width)))
        in_range = g.op.Where(outside, g.const(0), count)
        if left:
            power = g.op.Gather(g.const(_POWERS), in_range, axis=0)
            result = g.op.Where(outside, g.const(0), g.op.Mul(x, power))
        else:
            gone = g.op.Where(g.op.Less(x, g.const(0)), g.const(-1), g.const(0))
            result = g.op.Where(outside, gone, _shifted_right(g, x, in_range))
        return g.cast(result, dtype)

    convert.__name__ = convert.__qualname__ = "bitwise_left_shift" if left else "bitwise_right_shift"
    return convert


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
        left = g.op.Greater(reduce(g, "ReduceMax", rest, None, False), g.const(0))
        return [left, following, rest]

    graph = g.subgraph(body, [(INT64, ()), (BOOL, ()), (INT64, dims), (INT64, dims)], name="euclid")
    # One more round than needed turns the last divisor into the result.
    a, b = g.op.Loop(None, g.const(True), a, b, body=graph, _outputs=2)
    result = g.op.Where(g.op.Equal(b, g.const(0)), a, b)
    return g.cast(result, node.dtype)


def _both(name: str, converter: Converter, since: int | None = None, until: int | None = None) -> list[Rule]:
    return [Rule(f"aten::{name}.{overload}", converter, opset=(since, until)) for overload in ("Tensor", "Scalar")]


_LOGIC = {"and": "And", "or": "Or", "xor": "Xor"}
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
        Rule(f"aten::bitwise_{side}_shift.{overload}", shift(side == "left"))
        for side in ("left", "right")
        for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ],
    *[rule for name, left in (("__lshift__", True), ("__rshift__", False)) for rule in _both(name, shift(left))],
    Rule("aten::gcd.default", gcd),
]
