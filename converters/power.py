"""Powers and roots."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.exactness import THROUGH_DOUBLE
from onnxplug.converters.helpers.promotion import operand, operands
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def pow_(g: GraphBuilder, node: FxNode) -> Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    x, exponent = node.args
    dtype = node.dtype
    if not isinstance(exponent, Value):
        if exponent == 2:
            return compute(g, "Mul", dtype, x, x)
        if exponent == 0.5 and dtype.is_floating_point():
            # torch's (-inf) ** 0.5 is NaN, C's pow gives inf.
            return g.op.Sqrt(operand(g, x, dtype))
        if exponent == -0.5 and dtype.is_floating_point():
            # torch's rsqrt: NaN of -inf and -inf of -0.0, where C's pow gives 0 and inf.
            return g.op.Reciprocal(g.op.Sqrt(operand(g, x, dtype)))
        if dtype.is_integer() and exponent < 0:
            raise Unsupported("integers to a negative power: torch itself refuses it")
    if dtype.is_integer():
        return integer_power(g, x, exponent, dtype)
    inner = computed_in(g, "Pow", dtype)
    return g.cast(g.op.Pow(*operands(g, x, exponent, dtype=inner)), dtype)


def integer_power(g: GraphBuilder, x: Any, exponent: Any, dtype: ir.DataType) -> Value:
    """An integer power: by products, which wrap as torch's, when the exponent is a number or a known tensor of small numbers.

    Others by Pow in 64 bits; 0 to a negative power, infinite for Pow, is 0.
    """
    known = g.constant(exponent) if isinstance(exponent, Value) else None
    if known is not None and known.size and known.min() >= 0 and known.max() <= 64:
        return _power_by_bits(g, operand(g, x, INT64), known, dtype)
    if isinstance(exponent, Value):
        a, b = operands(g, x, exponent, dtype=INT64)
        zero = g.const(0)
        infinite = g.op.And(g.op.Equal(a, zero), g.op.Less(b, zero))
        return g.cast(g.op.Where(infinite, zero, g.op.Pow(a, b)), dtype)
    inner = computed_in(g, "Mul Add", dtype)
    base = operand(g, x, inner)
    if exponent == 0:
        return g.cast(g.op.Add(g.op.Mul(base, g.const(0, inner)), g.const(1, inner)), dtype)
    result: Value | None = None
    while exponent:
        if exponent & 1:
            result = base if result is None else g.op.Mul(result, base)
        exponent >>= 1
        if exponent:
            base = g.op.Mul(base, base)
    assert result is not None
    return g.cast(result, dtype)


def _power_by_bits(g: GraphBuilder, base: Value, exponents: np.ndarray, dtype: ir.DataType) -> Value:
    """To the power of known exponents from 0 to 64: the product of the squarings whose bit an exponent has."""
    one = g.const(1)
    result: Value | None = None
    for bit in range(max(1, int(exponents.max()).bit_length())):
        base = g.op.Mul(base, base) if bit else base
        factor = g.op.Where(g.const((exponents >> bit & 1).astype(bool)), base, one)
        result = factor if result is None else g.op.Mul(result, factor)
    assert result is not None
    return g.cast(result, dtype)


def _integer_power_of_tensors(node: FxNode) -> bool:
    return bool(node.dtype.is_integer()) and isinstance(node.args[1], Value)


def pow_exact(g: GraphBuilder, node: FxNode) -> Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor

    Integer powers by repeated squaring, which wrap around.
    """
    x, exponent = operands(g, *node.args, dtype=INT64)
    return g.cast(_squaring(g, x, exponent), node.dtype)


def _squaring(g: GraphBuilder, base: Value, exponent: Value) -> Value:
    """Repeated squaring of all elements at once, until every exponent is 0.

    To a negative power 1 is 1, -1 is ±1 and everything else 0, as in torch.
    """
    int64, zero, one, two = INT64, g.const(0), g.const(1), g.const(2)
    shape = g.op.Shape(g.op.Add(base, exponent))
    base, exponent = (g.op.Expand(v, shape) for v in (base, exponent))
    dims: Any = list(base.shape) if base.shape is not None else None

    def body(number: Value, going: Value, result: Value, power: Value, rest: Value) -> list[Value]:
        odd = g.op.Equal(g.op.Mod(rest, two), one)
        result = g.op.Where(odd, g.op.Mul(result, power), result)
        half = g.op.Div(rest, two)
        left = g.op.Greater(g.op.ReduceMax(half, keepdims=0), zero)
        return [left, result, g.op.Mul(power, power), half]

    inputs = [(int64, ()), (BOOL, ()), *[(int64, dims)] * 3]
    graph = g.subgraph(body, inputs, name="square")
    start = g.op.Expand(one, shape)
    power, _, _ = g.op.Loop(None, g.const(True), start, base, g.op.Abs(exponent), body=graph, _outputs=3)
    unit = g.op.Equal(g.op.Abs(base), one)
    negative = g.op.Less(exponent, zero)
    return g.op.Where(g.op.And(negative, g.op.Not(unit)), zero, power)


def square(g: GraphBuilder, node: FxNode) -> Value:
    """square(Tensor self) -> Tensor"""
    x = node.args[0]
    return compute(g, "Mul", node.dtype, x, x)


def rsqrt(g: GraphBuilder, node: FxNode) -> Value:
    """rsqrt(Tensor self) -> Tensor"""
    return g.op.Reciprocal(g.op.Sqrt(operand(g, node.args[0], node.dtype)))


RULES: list[Rule] = [
    *overloads_of("pow", "Tensor_Scalar Tensor_Tensor Scalar", pow_),
    *overloads_of(
        "pow",
        "Tensor_Scalar Tensor_Tensor Scalar",
        pow_exact,
        when=_integer_power_of_tensors,
        **THROUGH_DOUBLE,
    ),
    Rule("aten::rsqrt.default", rsqrt),
    Rule("aten::square.default", square),
]
