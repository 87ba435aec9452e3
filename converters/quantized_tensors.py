"""Tensors of torch's quantised dtypes: made, moved about, and turned back into numbers.

Rules for operators on them have the prefix ``quantized:`` before the operator's name. Operators that move elements about go
through the rules for ordinary tensors, on the integers; an operator without a rule here is an error.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.quantized import QUANTIZED_PREFIX, Quantized
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT32
from onnxplug.converters.helpers.exactness import HALFWAY
from onnxplug.converters.helpers.promotion import operand
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_INTEGERS = {torch.quint8: ir.DataType.UINT8, torch.qint8: ir.DataType.INT8, torch.qint32: INT32}


def _parameters(g: GraphBuilder, node: FxNode) -> tuple[Value, Value, Value]:
    """The tensor, and the scale and the zero point of one element each.

    Raises:
        Unsupported: torch does not quantise this dtype, or ONNX has none like the result's.
    """
    x, scale, zero_point, dtype = node.args
    if x.dtype != FLOAT:
        raise Unsupported(f"quantisation of {x.dtype.name.lower()}; PyTorch quantises float32 only")
    integers = _INTEGERS.get(dtype)
    if integers is None:
        raise Unsupported(f"quantisation to {dtype}; quint8, qint8 and qint32 can be exported")
    return x, g.reshape(operand(g, scale, FLOAT), []), g.reshape(operand(g, zero_point, integers), [])


def quantize_per_tensor(g: GraphBuilder, node: FxNode) -> Quantized:
    """quantize_per_tensor(Tensor self, float scale, int zero_point, ScalarType dtype) -> Tensor

    Also the overload whose numbers are tensors. Numbers halfway between two integers go to the even integer before the zero
    point is added, in PyTorch 2.13 on x86 after it.
    """
    if node.args[3] == torch.qint32:
        return quantize_exactly(g, node)  # QuantizeLinear has no int32.
    x, scale, zero_point = _parameters(g, node)
    return Quantized(g.op.QuantizeLinear(x, scale, zero_point), scale, zero_point)


@cache
def _rounds_first() -> bool:
    """Whether the installed PyTorch rounds before it adds the zero point: 0.5 goes to 0 then, and 0.5 + 1 to 2 else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.15 calls it deprecated
        return int(torch.quantize_per_tensor(torch.tensor([0.5]), 1.0, 1, torch.quint8).int_repr()) == 1


def quantize_exactly(g: GraphBuilder, node: FxNode) -> Quantized:
    """quantize_per_tensor(Tensor self, float scale, int zero_point, ScalarType dtype) -> Tensor

    By the formula of PyTorch's x86 kernel: the reciprocal of the scale, and the zero point added before rounding (2.13) or after
    it (2.15).
    """
    x, scale, zero_point = _parameters(g, node)
    assert zero_point.dtype is not None
    inverse = g.op.Div(g.const(1.0, FLOAT), scale)
    scaled, shift = g.op.Mul(x, inverse), g.cast(zero_point, FLOAT)
    levels = g.op.Add(g.op.Round(scaled), shift) if _rounds_first() else g.op.Round(g.op.Add(scaled, shift))
    limits = np.iinfo(zero_point.dtype.numpy())
    inner = DOUBLE if zero_point.dtype == INT32 else FLOAT  # the largest int32 is no float32
    limited = g.op.Clip(g.cast(levels, inner), g.const(int(limits.min), inner), g.const(int(limits.max), inner))
    return Quantized(g.cast(limited, zero_point.dtype), scale, zero_point)


def _dequantized(g: GraphBuilder, x: Quantized) -> Value:
    if x.integers.dtype != INT32:
        return g.op.DequantizeLinear(x.integers, x.scale, x.zero_point)
    # The difference wraps around in int32, as in PyTorch; DequantizeLinear takes no zero point but 0 for int32.
    return g.op.DequantizeLinear(g.op.Sub(x.integers, x.zero_point), x.scale)


def dequantize(g: GraphBuilder, node: FxNode) -> Value:
    """dequantize.self(Tensor self) -> Tensor"""
    return _dequantized(g, node.args[0])


def dequantize_tensors(g: GraphBuilder, node: FxNode) -> list[Value]:
    """dequantize.tensors(Tensor[] tensors) -> Tensor[]"""
    return [_dequantized(g, x) if isinstance(x, Quantized) else g.cast(x, FLOAT) for x in node.args[0]]


def dequantize_ordinary(g: GraphBuilder, node: FxNode) -> Value:
    """dequantize.self(Tensor self) -> Tensor

    For a tensor that is not quantised, its numbers in float32.
    """
    return g.cast(node.args[0], FLOAT)


def int_repr(g: GraphBuilder, node: FxNode) -> Value:
    """int_repr(Tensor self) -> Tensor"""
    result: Value = node.args[0].integers
    return result


def moved(g: GraphBuilder, node: FxNode) -> Any:
    """Converts an operator that only moves the elements of one quantised tensor, by applying it to the integers."""
    call, source = node.on_integers(), node.args[0]
    if not isinstance(source, Quantized):
        raise Decline("another argument is quantised")
    if not g.interpreter.has_rule(call):
        raise Decline("no rule for ordinary tensors")
    results = g.convert(call)
    if isinstance(results, list | tuple):
        return [source.with_integers(result) for result in results]
    return source.with_integers(results)


def joined(g: GraphBuilder, node: FxNode) -> Quantized:
    """cat(Tensor[] tensors, int dim=0) -> Tensor

    ``cat`` and ``stack`` of quantised tensors with the same scale and zero point.
    """
    first, *others = node.args[0]
    for other in others:
        if not isinstance(first, Quantized) or not isinstance(other, Quantized):
            raise Unsupported("quantised tensors together with ordinary ones")
        if other.scale is not first.scale or other.zero_point is not first.zero_point:
            raise Unsupported("quantised tensors of several scales or zero points, which PyTorch quantises anew")
    return first.with_integers(g.convert(node.on_integers()))


def shape_of(g: GraphBuilder, node: FxNode) -> Any:
    """Converts an operator that depends on a quantised tensor's shape alone, by the tensor's integers."""
    return g.convert(node.on_integers(results=False))


#: Operators whose first argument is the quantised tensor, and whose result has its scale and zero point.
_MOVING = """
view _unsafe_view reshape flatten unflatten ravel permute transpose t mT numpy_T movedim moveaxis swapaxes swapdims unsqueeze
squeeze expand broadcast_to slice select narrow split split_with_sizes chunk tensor_split unbind flip repeat tile clone contiguous
detach alias index_select unfold as_strided view_as reshape_as expand_as diagonal lift_fresh_copy repeat_interleave
""".split()

RULES: list[Rule] = [
    *[
        Rule(f"aten::quantize_per_tensor.{overload}", convert, **condition)
        for overload in ("default", "tensor_qparams")
        for convert, condition in ((quantize_per_tensor, {}), (quantize_exactly, HALFWAY))
    ],
    Rule("aten::dequantize.self", dequantize_ordinary),
    Rule(f"{QUANTIZED_PREFIX}aten::dequantize.self", dequantize),
    Rule(f"{QUANTIZED_PREFIX}aten::dequantize.tensors", dequantize_tensors),
    Rule(f"{QUANTIZED_PREFIX}aten::int_repr.default", int_repr),
    *[Rule(f"{QUANTIZED_PREFIX}aten::{name}", moved) for name in _MOVING],
    *[Rule(f"{QUANTIZED_PREFIX}aten::{name}", joined) for name in ("cat", "stack")],
    *[Rule(f"{QUANTIZED_PREFIX}aten::{name}", shape_of) for name in ("sym_size", "sym_numel")],
]
