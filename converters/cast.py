"""Conversion of dtypes, copies, and dropout: what leaves the values as they are."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import SINCE
from onnxplug.converters._axes import rank_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

_SMALL = frozenset({ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT16})
_EIGHT_BITS = frozenset(
    {
        ir.DataType.FLOAT8E4M3FN,
        ir.DataType.FLOAT8E4M3FNUZ,
        ir.DataType.FLOAT8E5M2,
        ir.DataType.FLOAT8E5M2FNUZ,
    }
)


def _to_eight_bits(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """An 8-bit float: e4m3fn saturates in torch, the others overflow to infinity or NaN.

    Of e5m2, ONNX Runtime makes NaN where rounding up gives infinity: at 61440 and beyond.
    """
    if g.opset < SINCE[dtype]:
        raise Unsupported(
            f"{dtype.name.lower()} below opset {SINCE[dtype]}", hint=f"Export for opset {SINCE[dtype]} or later."
        )
    if dtype == ir.DataType.FLOAT8E5M2 and x.dtype is not None and x.dtype.is_floating_point():
        x = g.cast(x, ir.DataType.FLOAT)
        x = g.op.Where(g.op.GreaterOrEqual(g.op.Abs(x), 61440.0), g.op.Mul(x, float("inf")), x)
    result: Value = g.op.Cast(x, to=int(dtype), saturate=int(dtype == ir.DataType.FLOAT8E4M3FN))
    return result


def convert_dtype(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """``x`` in another dtype. Floats reach small integers through int64: out of range they wrap, as torch's do."""
    if dtype in _EIGHT_BITS and x.dtype != dtype:
        return _to_eight_bits(g, x, dtype)
    if x.dtype is not None and x.dtype.is_floating_point() and dtype in _SMALL:
        return g.cast(g.cast(x, ir.DataType.INT64), dtype)
    return g.cast(x, dtype)


def to(g: GraphBuilder, node: FxNode) -> Value:
    """to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)

    Device and memory format mean nothing in ONNX.
    """  # noqa: E501
    return convert_dtype(g, node.args[0], node.dtype)


def identity(g: GraphBuilder, node: FxNode) -> Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
    x: Value = node.args[0]
    return x


def copy(g: GraphBuilder, node: FxNode) -> Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor

    The source in the shape and dtype of self.
    """
    target, source = node.args[:2]
    source = convert_dtype(g, source, node.dtype)
    if source.shape is not None and tuple(source.shape) == node.shape and rank_of(source) == len(node.shape):
        return source
    result: Value = g.op.Expand(source, g.shape(target))
    return result


def randomly_dropped(g: GraphBuilder, x: Value, p: float) -> tuple[Value, Value]:
    """``x`` with each element zero with probability ``p``, the others scaled up; and which of them are left.

    Not a Dropout: ONNX Runtime's optimiser takes that node out in training mode too.
    """
    dtype = x.dtype
    assert dtype is not None
    inner = ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype
    x = g.cast(x, inner)
    kept: Value = g.op.GreaterOrEqual(g.op.RandomUniformLike(x, dtype=int(ir.DataType.FLOAT)), float(p))
    scale = g.op.Where(kept, g.const(1 / (1 - p) if p < 1 else 0.0, inner), g.const(0.0, inner))
    return g.cast(g.op.Mul(x, scale), dtype), kept


def dropout(g: GraphBuilder, node: FxNode) -> Value:
    """dropout(Tensor input, float p, bool train) -> Tensor

    In training mode random at each run.
    """
    x, p, train = node.args
    if not train or p == 0:
        return x
    return randomly_dropped(g, x, p)[0]


def native_dropout(g: GraphBuilder, node: FxNode) -> list[Value]:
    """native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)"""
    x, p, train = node.args
    if train is False:
        return [x, g.op.Equal(x, x)]
    return list(randomly_dropped(g, x, p))


def view_dtype(g: GraphBuilder, node: FxNode) -> Value:
    """view.dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)"""
    x, dtype = node.args
    if isinstance(dtype, torch.dtype) and node.dtype != x.dtype:
        raise Unsupported("a tensor's bits seen as another dtype")
    return x


_IDENTITY = [
    "clone",
    "contiguous",
    "detach",
    "alias",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "resolve_conj",
    "resolve_neg",
    "positive",
    "detach_copy",
    "alias_copy",
]

RULES: list[Rule] = [
    *[Rule(f"aten::to.{overload}", to) for overload in ("dtype", "dtype_layout", "device", "other", "prim_Device")],
    Rule("aten::_to_copy.default", to),
    Rule("aten::type_as.default", to),
    Rule("prims::convert_element_type.default", to),
    *[Rule(f"aten::{name}.default", identity) for name in _IDENTITY],
    Rule("aten::copy.default", copy),
    Rule("aten::dropout.default", dropout),
    Rule("aten::native_dropout.default", native_dropout),
    Rule("aten::view.dtype", view_dtype),
]
