"""Sums and products, elementwise, with torch's type promotion."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT
from onnxplug.converters.helpers.promotion import operands, wide
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.errors import Decline
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_LAYER_NORM = torch.ops.aten.layer_norm.default


def _scaled(g: GraphBuilder, x: Any, alpha: Any, dtype: ir.DataType) -> Any:
    """``x * alpha``; ``x`` itself when alpha is 1."""
    if not isinstance(alpha, Value) and alpha == 1:
        return x
    return compute(g, "Mul", dtype, x, alpha)


def add(g: GraphBuilder, node: FxNode) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    x, y, alpha = node.args
    dtype = node.dtype
    if dtype == BOOL:
        return g.op.Or(*operands(g, x, y, dtype=BOOL))
    return compute(g, "Add", dtype, x, _scaled(g, y, alpha, dtype))


def _before_norm(node: FxNode) -> bool:
    """Whether the operand of a layer norm is the sum of two tensors of an element type for which ONNX Runtime fuses both nodes."""
    x, y, alpha = node.args
    if node.dtype not in (FLOAT, DOUBLE) or not (isinstance(x, Value) and isinstance(y, Value)):
        return False
    if x.dtype != node.dtype or y.dtype != node.dtype or type(alpha) is Value or alpha != 1:
        return False
    return any(user.target is _LAYER_NORM and user.args[0] is node.fx for user in node.fx.users)


def sum_before_norm(g: GraphBuilder, node: FxNode) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor

    ``Sum`` instead of ``Add``, as the rewrite of that name does it for sums of other converters.
    """
    if not g.optimize:
        raise Decline("the plain form is requested")
    return g.op.Sum(*node.args[:2])


def sub(g: GraphBuilder, node: FxNode) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    x, y, alpha = node.args
    return compute(g, "Sub", node.dtype, x, _scaled(g, y, alpha, node.dtype))


def rsub(g: GraphBuilder, node: FxNode) -> Value:
    """rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    x, y, alpha = node.args
    return compute(g, "Sub", node.dtype, y, _scaled(g, x, alpha, node.dtype))


def mul(g: GraphBuilder, node: FxNode) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    x, y = node.args[:2]
    if node.dtype == BOOL:
        return g.op.And(*operands(g, x, y, dtype=BOOL))
    return compute(g, "Mul", node.dtype, x, y)


def addcmul(g: GraphBuilder, node: FxNode) -> Value:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    x, a, b, value = node.args
    dtype = wide(node.dtype)
    return g.cast(compute(g, "Add", dtype, x, _scaled(g, compute(g, "Mul", dtype, a, b), value, dtype)), node.dtype)


def addcdiv(g: GraphBuilder, node: FxNode) -> Value:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    x, a, b, value = node.args
    dtype = wide(node.dtype)
    return g.cast(compute(g, "Add", dtype, x, compute(g, "Div", dtype, _scaled(g, a, value, dtype), b)), node.dtype)


def lerp(g: GraphBuilder, node: FxNode) -> Value:
    """lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor

    For weights above one half torch computes from ``end``.
    """
    inner = wide(node.dtype)
    start, end, weight = operands(g, *node.args, dtype=inner)
    span = g.op.Sub(end, start)
    from_start = g.op.Add(start, g.op.Mul(weight, span))
    from_end = g.op.Sub(end, g.op.Mul(span, g.op.Sub(g.const(1.0, inner), weight)))
    result = g.op.Where(g.op.Less(g.op.Abs(weight), g.const(0.5, inner)), from_start, from_end)
    return g.cast(result, node.dtype)


RULES: list[Rule] = [
    *overloads_of("add", "Tensor Scalar", add),
    Rule(
        "aten::add.Tensor",
        sum_before_norm,
        opset=(17, None),
        target="onnxruntime:cpu",
        when=_before_norm,
        reason="ONNX Runtime fuses Add and LayerNormalization into an operator that is slower than both on the CPU",
    ),
    *overloads_of("sub subtract", "Tensor Scalar", sub),
    *overloads_of("rsub", "Tensor Scalar", rsub),
    *overloads_of("mul multiply", "Tensor Scalar", mul),
    Rule("aten::addcmul.default", addcmul),
    Rule("aten::addcdiv.default", addcdiv),
    *overloads_of("lerp", "Scalar Tensor", lerp),
]
