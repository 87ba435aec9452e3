"""Tensors made from sizes and numbers: filled, ranges, identity matrices; and triangles of a tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.fill import filled, sizes_of
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.runtimes import has_kernel
from onnxplug.converters.helpers.selection import select
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def full(g: GraphBuilder, node: FxNode) -> Value:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return filled(g, node.args[1], sizes_of(node, 0), node.dtype)


def constant_fill(value: int, position: int) -> Converter:
    """zeros, ones, empty and their ``new_`` forms; uninitialised memory is zero here."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        return filled(g, value, sizes_of(node, position), node.dtype)

    convert.__name__ = convert.__qualname__ = f"fill_with_{value}"
    return convert


def new_full(g: GraphBuilder, node: FxNode) -> Value:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return filled(g, node.args[2], sizes_of(node, 1), node.dtype)


def _like_sizes(g: GraphBuilder, node: FxNode) -> list[Any]:
    return g.dims(node.args[0])


def full_like(g: GraphBuilder, node: FxNode) -> Value:
    """full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"""  # noqa: E501
    return filled(g, node.args[1], _like_sizes(g, node), node.dtype)


def fill_like(value: int) -> Converter:
    """zeros_like, ones_like, empty_like."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        return filled(g, value, _like_sizes(g, node), node.dtype)

    convert.__name__ = convert.__qualname__ = f"like_filled_with_{value}"
    return convert


def zeros_of_features(g: GraphBuilder, node: FxNode) -> Value:
    """_new_zeros_with_same_feature_meta(Tensor self, Tensor other, *, int self_num_batch_dims=0) -> Tensor

    The first ``self_num_batch_dims`` axes of self, then the axes of other: a tangent of zeros.
    """
    batched, other, count = node.args
    return filled(g, 0, [*g.dims(batched)[:count], *g.dims(other)], node.dtype)


def scalar_tensor(g: GraphBuilder, node: FxNode) -> Value:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return operand(g, node.args[0], node.dtype)


def arange(g: GraphBuilder, node: FxNode) -> Value:
    """arange(Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""
    return _arange(g, node, 0, node.args[0], 1)


def arange_start(g: GraphBuilder, node: FxNode) -> Value:
    """arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _arange(g, node, node.args[0], node.args[1], 1)


def arange_step(g: GraphBuilder, node: FxNode) -> Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _arange(g, node, *node.args[:3])


def _arange(g: GraphBuilder, node: FxNode, start: Any, end: Any, step: Any) -> Value:
    """Computed as torch does: start + step * i in int64 or double, converted to the dtype last."""
    dtype = node.dtype
    whole = not any(isinstance(x, float) or (isinstance(x, Value) and x.dtype != INT64) for x in (start, end, step))
    if not any(isinstance(x, Value) for x in (start, end, step)) and isinstance(node.shape[0], int):
        import torch

        if node.shape[0] <= 4096:
            return g.const(torch.arange(start, end, step, dtype=_torch(dtype)))
    if dtype.is_integer() and not whole:
        return _arange_of_floats(g, dtype, start, end, step)
    inner = INT64 if whole else DOUBLE
    first, last, by = (operand(g, x, inner) for x in (start, end, step))
    return g.cast(g.op.Range(first, last, by), dtype)


def _arange_of_floats(g: GraphBuilder, dtype: ir.DataType, start: Any, end: Any, step: Any) -> Value:
    """An arange of integers with float arguments, each of which is truncated to an integer first.

    The number of elements follows from the floats (``arange_out`` in RangeFactories.cpp), but for int64 from the integers
    in releases of PyTorch such as 2.13.
    """
    first, last, by = (g.cast(operand(g, x, DOUBLE), INT64) for x in (start, end, step))
    if dtype == INT64 and _counts_integers():
        return g.op.Range(first, last, by)
    low, high, width = (operand(g, x, DOUBLE) for x in (start, end, step))
    count = g.cast(g.op.Ceil(g.op.Div(g.op.Sub(high, low), width)), INT64)
    places = g.op.Range(g.const(0), count, g.const(1))
    return g.cast(g.op.Add(first, g.op.Mul(places, by)), dtype)


@cache
def _counts_integers() -> bool:
    """Whether the installed PyTorch counts the elements of an int64 range between the truncated bounds."""
    import torch

    return len(torch.arange(0, 4.5, 1.5, dtype=torch.int64)) == 4  # 0, 1, 2, 3; by the floats 0, 1, 2


def _torch(dtype: ir.DataType) -> Any:
    from onnxplug.build.dtypes import to_torch_dtype

    return to_torch_dtype(dtype)


def linspace(g: GraphBuilder, node: FxNode) -> Value:
    """linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    start, end, steps = node.args[:3]
    if not any(isinstance(x, Value) for x in (start, end, steps)):
        import torch

        return g.const(torch.linspace(start, end, steps, dtype=_torch(node.dtype)))
    # Computed from both ends towards the middle, in the result's dtype, or in double where that is an integer type.
    dtype = node.dtype
    inner = dtype if dtype in (FLOAT, DOUBLE) else DOUBLE
    first, last = (g.cast(operand(g, x, dtype), inner) for x in (start, end))
    count = g.as_scalar(steps)
    places = g.op.Range(g.const(0), count, g.const(1))
    gaps = g.op.Sub(count, g.const(1))
    step = g.op.Div(g.op.Sub(last, first), g.cast(g.op.Max(gaps, g.const(1)), inner))
    up = g.op.Add(first, g.op.Mul(step, g.cast(places, inner)))
    down = g.op.Sub(last, g.op.Mul(step, g.cast(g.op.Sub(gaps, places), inner)))
    half = g.op.Div(g.op.Add(count, g.cast(g.op.Equal(count, g.const(1)), INT64)), g.const(2))
    return g.cast(g.op.Where(g.op.Less(places, half), up, down), dtype)


def eye(g: GraphBuilder, node: FxNode) -> Value:
    """eye(SymInt n, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""
    return _identity_matrix(g, node, node.args[0], node.args[0])


def eye_m(g: GraphBuilder, node: FxNode) -> Value:
    """eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _identity_matrix(g, node, *node.args[:2])


def _identity_matrix(g: GraphBuilder, node: FxNode, rows: Any, columns: Any) -> Value:
    row = g.op.Range(g.const(0), g.as_scalar(rows), g.const(1))
    column = g.op.Range(g.const(0), g.as_scalar(columns), g.const(1))
    return g.cast(g.op.Equal(unsqueeze(g, row, 1), unsqueeze(g, column, 0)), node.dtype)


def triangle(upper: int) -> Converter:
    """tril, triu: of the last two axes."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, diagonal = node.args
        if has_kernel(g, "Trilu", node.dtype):  # since opset 14
            return g.op.Trilu(x, g.as_scalar(diagonal), upper=upper)
        rank = rank_of(x)
        row = g.op.Range(g.const(0), g.as_scalar(g.dim(x, rank - 2)), g.const(1))
        column = g.op.Range(g.const(0), g.as_scalar(g.dim(x, rank - 1)), g.const(1))
        edge = g.op.Add(unsqueeze(g, row, 1), g.as_scalar(diagonal))
        line = unsqueeze(g, column, 0)
        keep = g.op.GreaterOrEqual(line, edge) if upper else g.op.LessOrEqual(line, edge)
        if node.dtype == BOOL:
            result = g.op.And(keep, x)
            return result
        return select(g, keep, x, 0, node.dtype)

    convert.__name__ = convert.__qualname__ = "triu" if upper else "tril"
    return convert


def fill(g: GraphBuilder, node: FxNode) -> Value:
    """fill.Scalar(Tensor self, Scalar value) -> Tensor"""
    return filled(g, node.args[1], g.dims(node.args[0]), node.dtype)


def zero(g: GraphBuilder, node: FxNode) -> Value:
    """zero(Tensor self) -> Tensor"""
    return filled(g, 0, g.dims(node.args[0]), node.dtype)


RULES: list[Rule] = [
    Rule("aten::full.default", full),
    Rule("aten::zeros.default", constant_fill(0, 0)),
    Rule("aten::ones.default", constant_fill(1, 0)),
    Rule("aten::empty.memory_format", constant_fill(0, 0)),
    Rule("aten::empty_strided.default", constant_fill(0, 0)),
    Rule("aten::empty_permuted.default", constant_fill(0, 0)),
    Rule("aten::_new_zeros_with_same_feature_meta.default", zeros_of_features),
    Rule("aten::new_zeros.default", constant_fill(0, 1)),
    Rule("aten::new_ones.default", constant_fill(1, 1)),
    Rule("aten::new_empty.default", constant_fill(0, 1)),
    Rule("aten::new_empty_strided.default", constant_fill(0, 1)),
    Rule("aten::new_full.default", new_full),
    Rule("aten::full_like.default", full_like),
    Rule("aten::zeros_like.default", fill_like(0)),
    Rule("aten::ones_like.default", fill_like(1)),
    Rule("aten::empty_like.default", fill_like(0)),
    Rule("aten::scalar_tensor.default", scalar_tensor),
    Rule("aten::arange.default", arange),
    Rule("aten::arange.start", arange_start),
    Rule("aten::arange.start_step", arange_step),
    Rule("aten::linspace.default", linspace),
    Rule("aten::eye.default", eye),
    Rule("aten::eye.m", eye_m),
    Rule("aten::tril.default", triangle(0)),
    Rule("aten::triu.default", triangle(1)),
    Rule("aten::fill.Scalar", fill),
    Rule("aten::fill.Tensor", fill),
    Rule("aten::zero.default", zero),
]
