"""Conversion of dtypes, copies and dropout."""

from __future__ import annotations

import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.casts import convert_dtype
from onnxplug.converters.helpers.dropout import randomly_dropped
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def to(g: GraphBuilder, node: FxNode) -> Value:
    """to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)

    ONNX has no devices and no memory formats, so these arguments are ignored. In a graph that torch decomposed, a Python number
    may replace a tensor.
    """  # noqa: E501
    source = node.args[0]
    if isinstance(source, bool | int | float):
        return g.const(source, node.dtype)
    return convert_dtype(g, source, node.dtype)


def identity(g: GraphBuilder, node: FxNode) -> Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
    return node.args[0]


def copy(g: GraphBuilder, node: FxNode) -> Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor

    The source, broadcast to the shape of self and converted to its dtype.
    """
    target, source = node.args[:2]
    source = convert_dtype(g, source, node.dtype)
    if source.shape is not None and tuple(source.shape) == node.shape and rank_of(source) == len(node.shape):
        return source
    return g.op.Expand(source, g.shape(target))


def dropout(g: GraphBuilder, node: FxNode) -> Value:
    """dropout(Tensor input, float p, bool train) -> Tensor

    In training mode the result is random at each run.
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
