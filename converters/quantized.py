"""Quantisation: integers with a scale and a zero point, and arithmetic on them.

torch multiplies by the reciprocal of the scale where QuantizeLinear divides by it. Both quotients are correct to the
last place, so the results differ only for numbers that close to the middle between two integers, where torch's own
result is as arbitrary; and runtimes fuse only QuantizeLinear and DequantizeLinear into integer arithmetic. With
``exact=True``, and where they differ in another way, the formula is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import to_onnx_dtype, to_torch_dtype
from onnxplug.build.quantized import REDUCED
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import normalize_axis, rank_of
from onnxplug.converters.helpers.casts import convert_dtype
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, FLOAT16, HALVES, INT32, INT64, WIDE_INTEGERS
from onnxplug.converters.helpers.exactness import HALFWAY
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

#: The result types of QuantizeLinear at every opset.
_BYTES = frozenset({ir.DataType.INT8, ir.DataType.UINT8})


class Scheme(NamedTuple):
    """How numbers are quantised.

    Attributes:
        scale: A number, or a tensor: one number, or one for each place on the axis.
        zero_point: The same; where it is not an integer, it is added before rounding.
        low: The least integer.
        high: The greatest.
        axis: The axis that has a scale for each place, ``None`` for a single scale.
    """

    scale: Any
    zero_point: Any
    low: Any
    high: Any
    axis: int | None = None


def _bounds(dtype: ir.DataType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy())
    return int(info.min), int(info.max)


def _within(dtype: ir.DataType, *numbers: Any) -> bool:
    low, high = _bounds(dtype)
    return all(isinstance(n, int) and low <= n <= high for n in numbers)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) or (isinstance(x, Value) and x.dtype is not None and x.dtype.is_integer())


def _holds(dtype: ir.DataType, zero_point: Any) -> bool:
    """Whether a dtype can hold the zero point.

    Zero points in a tensor are assumed to lie in the range of the integers.
    """
    return _is_integer(zero_point) if isinstance(zero_point, Value) else _within(dtype, zero_point)


def _promoted(*values: Value) -> ir.DataType:
    """The dtype to which torch promotes tensors with dimensions."""
    result, *others = (to_torch_dtype(v.dtype) for v in values if v.dtype is not None)
    for dtype in others:
        result = torch.promote_types(result, dtype)
    return to_onnx_dtype(result)


def _parameter(g: GraphBuilder, x: Any, dtype: ir.DataType, axis: int | None = None) -> Value:
    """A scale, zero point or limit in a dtype: 1-dim for an axis, else 0-dim."""
    value = operand(g, x, dtype)
    return g.reshape(value, []) if axis is None and rank_of(value) else value


def _along(g: GraphBuilder, x: Value, rank: int, axis: int | None) -> Value:
    """A parameter in the shape that broadcasts along its axis."""
    return x if axis is None else g.reshape(x, [g.dim(x, 0) if a == axis else 1 for a in range(rank)])


def _clamped(g: GraphBuilder, x: Value, low: Any, high: Any) -> Value:
    assert x.dtype is not None
    return g.op.Clip(x, _parameter(g, low, x.dtype), _parameter(g, high, x.dtype))


def _linear(g: GraphBuilder, x: Value, scheme: Scheme, dtype: ir.DataType) -> Value:
    """QuantizeLinear, limited further where the range is narrower than the dtype."""
    scale = _parameter(g, scheme.scale, FLOAT, scheme.axis)
    result = g.op.QuantizeLinear(x, scale, _parameter(g, scheme.zero_point, dtype, scheme.axis), axis=scheme.axis)
    return result if (scheme.low, scheme.high) == _bounds(dtype) else _clamped(g, result, scheme.low, scheme.high)


def _levels(g: GraphBuilder, x: Value, scheme: Scheme, inner: ir.DataType) -> Value:
    """``round(x / scale) + zero_point``, not limited yet. The reciprocal is rounded to the scale's own dtype."""
    scale, zero_point, axis = scheme.scale, scheme.zero_point, scheme.axis
    rank = rank_of(x)
    if isinstance(scale, Value):
        single = g.op.Div(g.const(1.0, scale.dtype), _parameter(g, scale, scale.dtype or inner, axis))
        inverse = _along(g, g.cast(single, inner), rank, axis)
    else:
        inverse = g.const(np.float32(1.0 / scale), inner)  # divided in the scale's own precision
    scaled = g.op.Mul(g.cast(x, inner), inverse)
    if not isinstance(zero_point, Value) and zero_point == 0:
        return g.op.Round(scaled)
    shift = _along(g, _parameter(g, zero_point, inner, axis), rank, axis)
    result = g.op.Add(g.op.Round(scaled), shift) if _is_integer(zero_point) else g.op.Round(g.op.Add(scaled, shift))
    return result


# -- to integers -------------------------------------------------------------------------------------------------------


def _quantized(g: GraphBuilder, x: Value, scheme: Scheme, dtype: ir.DataType, exact: bool) -> Value:
    x = g.cast(x, FLOAT) if x.dtype in HALVES else x
    plain = dtype in _BYTES and _within(dtype, scheme.low, scheme.high) and _holds(dtype, scheme.zero_point)
    if plain and x.dtype == FLOAT and not exact:
        return _linear(g, x, scheme, dtype)
    # A scale for each place takes part in the promotion, a single one does not.
    inner = FLOAT if scheme.axis is None else _promoted(x, scheme.scale)
    return convert_dtype(g, _clamped(g, _levels(g, x, scheme, inner), scheme.low, scheme.high), dtype)


def quantize_per_tensor(g: GraphBuilder, node: FxNode, exact: bool = False) -> Value:
    """quantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype) -> Tensor

    Also the overload whose numbers are tensors.
    """
    x, scale, zero_point, low, high = node.args[:5]
    return _quantized(g, x, Scheme(scale, zero_point, low, high), node.dtype, exact)


def quantize_per_channel(g: GraphBuilder, node: FxNode, exact: bool = False) -> Value:
    """quantize_per_channel(Tensor input, Tensor scales, Tensor zero_points, int axis, int quant_min, int quant_max, ScalarType dtype) -> Tensor"""  # noqa: E501
    x, scales, zero_points, axis, low, high = node.args[:6]
    scheme = Scheme(scales, zero_points, low, high, normalize_axis(axis, rank_of(x)))
    return _quantized(g, x, scheme, node.dtype, exact)


def quantize_per_token(g: GraphBuilder, node: FxNode) -> Value:
    """quantize_per_token(Tensor input, Tensor scales, Tensor zero_points, int quant_min, int quant_max, ScalarType dtype) -> Tensor

    The zero point is added before rounding.
    """
    x, scales, zero_points, low, high = node.args[:5]
    return _by_place(g, x, scales, zero_points, low, high, node.dtype)


def _by_place(
    g: GraphBuilder, x: Value, scales: Value, zero_points: Value, low: int, high: int, dtype: ir.DataType
) -> Value:
    """Quantised with parameters that broadcast."""
    inner = _promoted(x, scales)
    if inner in HALVES:
        raise Unsupported(f"quantisation with scales of {inner.name.lower()}")
    inverse = g.cast(g.op.Div(g.const(1.0, scales.dtype), scales), inner)
    scaled = g.op.Round(g.op.Add(g.op.Mul(g.cast(x, inner), inverse), g.cast(zero_points, inner)))
    return convert_dtype(g, _clamped(g, scaled, low, high), dtype)


def quantize_per_channel_group(g: GraphBuilder, node: FxNode) -> Value:
    """quantize_per_channel_group(Tensor input, Tensor scales, Tensor zero_points, int quant_min, int quant_max, ScalarType dtype, int group_size) -> Tensor"""  # noqa: E501
    x, scales, zero_points, low, high, _, size = node.args
    grouped, scales, zero_points = _grouped(g, x, scales, zero_points, size)
    return g.reshape(_by_place(g, grouped, scales, zero_points, low, high, node.dtype), g.dims(x))


def _grouped(g: GraphBuilder, x: Value, scales: Value, zero_points: Value | None, size: int) -> tuple[Any, ...]:
    """A matrix [rows, groups, size], and the groups' parameters, [rows, groups, 1]."""
    (width,) = g.concrete_shape([g.dim(x, -1)], "length of the rows")
    size = width if size > width and g.dim(scales, -1) == 1 else size
    parts = [*g.dims(x)[:-1], width // size]
    parameters = (v if v is None else g.reshape(v, [*parts, 1]) for v in (scales, zero_points))
    return g.reshape(x, [*parts, size]), *parameters


# -- from integers -----------------------------------------------------------------------------------------------------


def dequantize_per_tensor(g: GraphBuilder, node: FxNode) -> Value:
    """dequantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype, *, ScalarType? out_dtype=None) -> Tensor

    Also the overload whose numbers are tensors. Torch converts first: bytes and their differences are exact in float16, but not in
    bfloat16, where it rounds after the subtraction.
    """  # noqa: E501
    x, scale, zero_point, low, high = node.args[:5]
    dtype = node.dtype
    if x.dtype in _BYTES and dtype in (FLOAT, FLOAT16) and _holds(x.dtype, zero_point):
        result = g.op.DequantizeLinear(x, _parameter(g, scale, FLOAT), _parameter(g, zero_point, x.dtype))
        if isinstance(low, int) and isinstance(high, int) and 0 <= low <= high < 128:
            result.meta[REDUCED] = True
        return g.cast(result, dtype)
    if x.dtype == INT32 and dtype == FLOAT and not isinstance(zero_point, Value) and zero_point == 0:
        return g.op.DequantizeLinear(x, _parameter(g, scale, FLOAT))
    inner = DOUBLE if dtype == DOUBLE else FLOAT
    shifted = g.op.Sub(g.cast(g.cast(x, dtype), inner), _parameter(g, zero_point, inner))
    shifted = g.cast(g.cast(shifted, dtype), inner)
    return g.cast(g.op.Mul(shifted, _parameter(g, scale, inner)), dtype)


def dequantize_per_channel(g: GraphBuilder, node: FxNode) -> Value:
    """dequantize_per_channel(Tensor input, Tensor scales, Tensor? zero_points, int axis, int quant_min, int quant_max, ScalarType dtype, *, ScalarType? out_dtype=None) -> Tensor"""  # noqa: E501
    x, scales, zero_points, axis = node.args[:4]
    rank = rank_of(x)
    axis = normalize_axis(axis, rank)
    single = scales.dtype == FLOAT or (scales.dtype == DOUBLE and node.dtype != DOUBLE)
    if x.dtype in _BYTES and single and (zero_points is None or zero_points.dtype in WIDE_INTEGERS):
        zero = None if zero_points is None else g.cast(zero_points, x.dtype)
        return g.cast(g.op.DequantizeLinear(x, g.cast(scales, FLOAT), zero, axis=axis), node.dtype)
    zero_points = zero_points if zero_points is None else _along(g, zero_points, rank, axis)
    return _restored(g, x, _along(g, scales, rank, axis), zero_points, node.dtype)


def _restored(g: GraphBuilder, x: Value, scales: Value, zero_points: Value | None, dtype: ir.DataType) -> Value:
    """``(x - zero_point) * scale`` with parameters that broadcast, promoted as torch does: bytes of one dtype wrap."""
    if zero_points is not None:
        x = compute(g, "Sub", _promoted(x, zero_points), x, zero_points)
    inner = _promoted(x, scales)
    if inner in HALVES:
        x = g.cast(x, inner)
        return g.cast(g.cast(compute(g, "Mul", FLOAT, x, scales), inner), dtype)
    return g.cast(compute(g, "Mul", inner, x, scales), dtype)


def dequantize_per_token(g: GraphBuilder, node: FxNode) -> Value:
    """dequantize_per_token(Tensor input, Tensor scales, Tensor zero_points, int quant_min, int quant_max, ScalarType dtype, ScalarType output_dtype) -> Tensor"""  # noqa: E501
    x, scales, zero_points = node.args[:3]
    return _restored(g, x, scales, zero_points, node.dtype)


def dequantize_per_channel_group(g: GraphBuilder, node: FxNode) -> Value:
    """dequantize_per_channel_group(Tensor input, Tensor scales, Tensor? zero_points, int quant_min, int quant_max, ScalarType dtype, int group_size, ScalarType output_dtype) -> Tensor"""  # noqa: E501
    x, scales, zero_points = node.args[:3]
    grouped, scales, zero_points = _grouped(g, x, scales, zero_points, node.args[6])
    return g.reshape(_restored(g, grouped, scales, zero_points, node.dtype), g.dims(x))


# -- the parameters from the data --------------------------------------------------------------------------------------


def _range_with_zero(g: GraphBuilder, x: Value, axes: list[int] | None) -> tuple[Value, Value]:
    """The least and greatest number, zero among them, in float; they are exact in it."""
    x = g.cast(x, FLOAT) if x.dtype in HALVES else x
    zero, keep = g.const(0.0, x.dtype), axes is not None
    low, high = reduce(g, "ReduceMin", x, axes, keep), reduce(g, "ReduceMax", x, axes, keep)
    return g.op.Min(low, zero), g.op.Max(high, zero)


def _rounded(g: GraphBuilder, x: Value, like: Value) -> Value:
    """``x`` in the precision of ``like``, for computation in float."""
    return g.cast(g.cast(x, like.dtype), x.dtype or FLOAT) if like.dtype in HALVES else x


def choose_qparams(g: GraphBuilder, node: FxNode) -> list[Value]:
    """choose_qparams.tensor(Tensor input, int quant_min, int quant_max, float eps, ScalarType dtype) -> (Tensor, Tensor)"""
    x, low, high, eps = node.args[:4]
    least, most = _range_with_zero(g, x, None)
    scale = _rounded(g, g.op.Div(_rounded(g, g.op.Sub(most, least), x), float(high - low)), x)
    scale = g.op.Max(scale, g.const(np.array([eps], dtype=np.float32)))
    zero_point = g.op.Sub(g.const(low), g.cast(g.op.Round(g.op.Div(least, scale)), INT64))
    return [g.cast(scale, DOUBLE), _clamped(g, zero_point, low, high)]


def choose_qparams_symmetric(g: GraphBuilder, node: FxNode) -> list[Value]:
    """choose_qparams_symmetric.tensor(Tensor input, int quant_min, int quant_max, float eps, ScalarType dtype) -> (Tensor, Tensor)"""  # noqa: E501
    x, low, high, eps, dtype = node.args
    least, most = _range_with_zero(g, x, None)
    scale = _rounded(g, g.op.Div(g.op.Max(g.op.Neg(least), most), float(high - low) / 2), x)
    scale = g.op.Max(scale, g.const(np.array([eps], dtype=np.float32)))
    zero_point = 128 if dtype == torch.uint8 else 0
    return [g.cast(scale, DOUBLE), g.const(np.array([zero_point], dtype=np.int64))]


def choose_qparams_per_token(g: GraphBuilder, node: FxNode) -> list[Value]:
    """choose_qparams_per_token(Tensor input, ScalarType dtype) -> (Tensor, Tensor)

    The results have the dtypes that torch declares; eager PyTorch returns float.
    """
    x = node.args[0]
    if x.dtype == ir.DataType.BFLOAT16:
        raise Unsupported("parameters by token of bfloat16")
    inner = FLOAT if x.dtype in HALVES else x.dtype
    greatest = reduce(g, "ReduceMax", g.op.Abs(g.cast(x, inner)), [rank_of(x) - 1], True)
    scale = g.op.Div(g.op.Max(greatest, g.const(1e-5, inner)), g.const(127.0, inner))
    zero_points = g.cast(g.op.Mul(scale, g.const(0.0, inner)), INT64)
    return [g.cast(scale, DOUBLE), zero_points]


def choose_qparams_per_token_asymmetric(g: GraphBuilder, node: FxNode) -> list[Value]:
    """choose_qparams_per_token_asymmetric(Tensor input, ScalarType dtype) -> (Tensor, Tensor)

    XNNPACK's choice between the two ends of the range: the end whose zero point has the smaller error.
    """
    x = node.args[0]
    if x.dtype in HALVES:
        raise Unsupported("parameters by token of a half type")
    least, most = _range_with_zero(g, x, [rank_of(x) - 1])
    scale = g.op.Max(g.op.Div(g.op.Sub(most, least), 255.0), g.const(float(np.finfo(np.float32).eps), x.dtype))
    lower, upper = g.op.Div(least, scale), g.op.Div(most, scale)
    positive = g.op.Greater(g.op.Add(g.op.Add(lower, -128.0), g.op.Add(upper, 127.0)), 0.0)
    zero_point = g.op.Where(
        positive, g.op.Sub(g.const(-128.0, x.dtype), lower), g.op.Sub(g.const(127.0, x.dtype), upper)
    )
    zero_point = g.op.Round(_clamped(g, zero_point, -128, 127))
    return [g.cast(scale, DOUBLE), g.cast(zero_point, INT64)]


# -- fake quantisation ----------------------------------------------------------------------------------------------------


def _fake(g: GraphBuilder, x: Value, scheme: Scheme, exact: bool) -> tuple[Value, Value]:
    """Quantised and restored, and which elements lie inside the range."""
    dtype, axis = x.dtype or FLOAT, scheme.axis
    inner = DOUBLE if dtype == DOUBLE else FLOAT
    low, high = g.const(scheme.low, inner), g.const(scheme.high, inner)
    # torch holds the scale in float here, and takes the reciprocal of that.
    single = scheme.scale if isinstance(scheme.scale, Value) else np.float32(scheme.scale)
    levels = _levels(g, x, scheme._replace(scale=single), inner)
    inside = g.op.And(g.op.GreaterOrEqual(levels, low), g.op.LessOrEqual(levels, high))
    storage = next((d for d in (ir.DataType.UINT8, ir.DataType.INT8) if _within(d, scheme.low, scheme.high)), None)
    if storage is not None and inner == FLOAT and _is_integer(scheme.zero_point) and not exact:
        scale, zero = _parameter(g, scheme.scale, FLOAT, axis), _parameter(g, scheme.zero_point, storage, axis)
        stored = _linear(g, g.cast(x, FLOAT), scheme, storage)
        return g.cast(g.op.DequantizeLinear(stored, scale, zero, axis=axis), dtype), inside
    # torch's conversion of NaN to an integer gives the least integer.
    limited = g.op.Where(g.op.IsNaN(levels), low, g.op.Clip(levels, low, high))
    shift, scale = (
        _along(g, _parameter(g, v, inner, axis), rank_of(x), axis) for v in (scheme.zero_point, scheme.scale)
    )
    shifted = g.op.Sub(limited, shift)
    if axis is None:
        # torch multiplies in float here, whatever the tensor's dtype.
        shifted, scale = g.cast(shifted, FLOAT), g.cast(scale, FLOAT)
    return g.cast(g.op.Mul(shifted, scale), dtype), inside


def fake_quantize_per_tensor(g: GraphBuilder, node: FxNode, exact: bool = False) -> Value:
    """fake_quantize_per_tensor_affine(Tensor self, float scale, int zero_point, int quant_min, int quant_max) -> Tensor

    Also with tensors for scale and zero point.
    """
    return _fake(g, node.args[0], Scheme(*node.args[1:5]), exact)[0]


def fake_quantize_per_channel(g: GraphBuilder, node: FxNode, exact: bool = False) -> Value:
    """fake_quantize_per_channel_affine(Tensor self, Tensor scale, Tensor zero_point, int axis, int quant_min, int quant_max) -> Tensor"""  # noqa: E501
    return _fake(g, node.args[0], _by_channel(node), exact)[0]


def _by_channel(node: FxNode) -> Scheme:
    x, scale, zero_point, axis, low, high = node.args
    return Scheme(scale, zero_point, low, high, normalize_axis(axis, rank_of(x)))


def fake_quantize_per_tensor_cachemask(g: GraphBuilder, node: FxNode, exact: bool = False) -> list[Value]:
    """fake_quantize_per_tensor_affine_cachemask(Tensor self, float scale, int zero_point, int quant_min, int quant_max) -> (Tensor output, Tensor mask)"""  # noqa: E501
    return list(_fake(g, node.args[0], Scheme(*node.args[1:5]), exact))


def fake_quantize_per_channel_cachemask(g: GraphBuilder, node: FxNode, exact: bool = False) -> list[Value]:
    """fake_quantize_per_channel_affine_cachemask(Tensor self, Tensor scale, Tensor zero_point, int axis, int quant_min, int quant_max) -> (Tensor output, Tensor mask)"""  # noqa: E501
    return list(_fake(g, node.args[0], _by_channel(node), exact))


def fake_quantize_if_enabled(g: GraphBuilder, node: FxNode, exact: bool = False) -> list[Value]:
    """_fake_quantize_per_tensor_affine_cachemask_tensor_qparams(Tensor self, Tensor scale, Tensor zero_point, Tensor fake_quant_enabled, int quant_min, int quant_max) -> (Tensor output, Tensor mask)"""  # noqa: E501
    x, scale, zero_point, enabled, low, high = node.args
    result, inside = _fake(g, x, Scheme(scale, zero_point, low, high), exact)
    on = g.cast(_parameter(g, enabled, enabled.dtype), BOOL)
    return [g.op.Where(on, result, x), g.op.Or(g.op.Not(on), inside)]


def fake_quantize_learnable(g: GraphBuilder, node: FxNode, exact: bool = False) -> Value:
    """_fake_quantize_learnable_per_tensor_affine(Tensor self, Tensor scale, Tensor zero_point, int quant_min, int quant_max, float grad_factor=1.) -> Tensor"""  # noqa: E501
    x, scale, zero_point, low, high = node.args[:5]
    return _fake(g, x, Scheme(scale, _learnt(g, zero_point, low, high), low, high), exact)[0]


def fake_quantize_learnable_by_channel(g: GraphBuilder, node: FxNode, exact: bool = False) -> Value:
    """_fake_quantize_learnable_per_channel_affine(Tensor self, Tensor scale, Tensor zero_point, int axis, int quant_min, int quant_max, float grad_factor=1.) -> Tensor"""  # noqa: E501
    x, scale, zero_point, axis, low, high = node.args[:6]
    scheme = Scheme(scale, _learnt(g, zero_point, low, high), low, high, normalize_axis(axis, rank_of(x)))
    return _fake(g, x, scheme, exact)[0]


def _learnt(g: GraphBuilder, zero_point: Value, low: int, high: int) -> Value:
    """A zero point in floating point as the integer that torch makes of it."""
    return g.cast(g.op.Clip(g.op.Round(g.cast(zero_point, FLOAT)), float(low), float(high)), INT64)


def fake_quantize_observed(g: GraphBuilder, node: FxNode, exact: bool = False) -> list[Value]:
    """_fused_moving_avg_obs_fq_helper_functional(Tensor self, Tensor observer_on, Tensor fake_quant_on, Tensor running_min, Tensor running_max, Tensor scale, Tensor zero_point, float averaging_const, int quant_min, int quant_max, int ch_axis, bool per_row_fake_quant=False, bool symmetric_quant=False) -> (Tensor output, Tensor mask, Tensor running_min_out, Tensor running_max_out, Tensor scale_out, Tensor zero_point_out)"""  # noqa: E501
    x, observes, enabled, least, most, scale, zero_point, _, low, high, axis, by_channel, _ = node.args
    flags = [g.stored(observes), g.stored(enabled)]
    if any(flag is None for flag in flags):
        raise Unsupported("a fake quantiser whose flags are computed")
    if bool(flags[0]):
        raise Unsupported(
            "a fake quantiser that observes: model.apply(torch.ao.quantization.disable_observer) keeps its scale"
        )
    scheme = Scheme(scale, zero_point, low, high, normalize_axis(axis, rank_of(x)) if by_channel else None)
    result, inside = _fake(g, x, scheme, exact)
    if not bool(flags[1]):
        result, inside = x, g.op.Expand(g.const(True), g.shape(x))
    return [result, inside, least, most, scale, zero_point]


# -- products ----------------------------------------------------------------------------------------------------------


def int_product(g: GraphBuilder, node: FxNode) -> Value:
    """_int_mm(Tensor self, Tensor mat2) -> Tensor"""
    return g.op.MatMulInteger(*node.args)


def int_product_of_unsigned(g: GraphBuilder, node: FxNode) -> Value:
    """_int_mm(Tensor self, Tensor mat2) -> Tensor

    The quantisation to unsigned bytes with a zero point.
    """
    values, zeros = [], []
    for x in node.args:
        signed = x.dtype == ir.DataType.INT8
        values.append(g.cast(g.op.Add(g.cast(x, INT32), 128), ir.DataType.UINT8) if signed else x)
        zeros.append(g.const(128 if signed else 0, ir.DataType.UINT8))
    return g.op.MatMulInteger(*values, *zeros)


def scaled_product(g: GraphBuilder, node: FxNode) -> Value:
    """_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor

    Computed in float: one scale, or one for each row of the first and each column of the second matrix.
    """  # noqa: E501
    a, b, scale_a, scale_b, bias, scale_result = node.args[:6]
    if scale_result is not None:
        raise Unsupported("_scaled_mm with a scale of the result")
    rows, columns = rank_of(scale_a) == 2, rank_of(scale_b) == 2
    if (rows and g.dim(scale_a, 1) != 1) or (columns and g.dim(scale_b, 0) != 1):
        raise Unsupported("_scaled_mm with scales by block")
    scale = g.op.Mul(g.cast(scale_a, FLOAT), g.cast(scale_b, FLOAT))
    result = g.op.Mul(g.op.MatMul(g.cast(a, FLOAT), g.cast(b, FLOAT)), scale)
    return convert_dtype(g, result if bias is None else g.op.Add(result, g.cast(bias, FLOAT)), node.dtype)


def _exactly(convert: Callable[..., Any]) -> Converter:
    """The form of a converter that multiplies by the reciprocal of the scale, as torch does."""

    @wraps(convert)
    def converter(g: GraphBuilder, node: FxNode) -> Any:
        return convert(g, node, exact=True)

    return converter


#: Operators that round to integers by QuantizeLinear, or exactly as torch does.
_ROUNDING = {
    **{f"quantized_decomposed::quantize_per_tensor.{o}": quantize_per_tensor for o in ("default", "tensor", "tensor2")},
    "quantized_decomposed::quantize_per_channel.default": quantize_per_channel,
    "aten::fake_quantize_per_tensor_affine.default": fake_quantize_per_tensor,
    "aten::fake_quantize_per_tensor_affine.tensor_qparams": fake_quantize_per_tensor,
    "aten::fake_quantize_per_channel_affine.default": fake_quantize_per_channel,
    "aten::fake_quantize_per_tensor_affine_cachemask.default": fake_quantize_per_tensor_cachemask,
    "aten::fake_quantize_per_channel_affine_cachemask.default": fake_quantize_per_channel_cachemask,
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": fake_quantize_if_enabled,
    "aten::_fake_quantize_learnable_per_tensor_affine.default": fake_quantize_learnable,
    "aten::_fake_quantize_learnable_per_channel_affine.default": fake_quantize_learnable_by_channel,
    "aten::_fused_moving_avg_obs_fq_helper_functional.default": fake_quantize_observed,
}

RULES: list[Rule] = [
    *[Rule(operator, convert) for operator, convert in _ROUNDING.items()],
    *[Rule(operator, _exactly(convert), **HALFWAY) for operator, convert in _ROUNDING.items()],
    *[
        Rule(f"quantized_decomposed::dequantize_per_tensor.{overload}", dequantize_per_tensor)
        for overload in ("default", "tensor", "tensor2")
    ],
    *[
        Rule(f"quantized_decomposed::{convert.__name__}.default", convert)
        for convert in (
            dequantize_per_channel,
            quantize_per_token,
            dequantize_per_token,
            quantize_per_channel_group,
            dequantize_per_channel_group,
            choose_qparams_per_token,
            choose_qparams_per_token_asymmetric,
        )
    ],
    Rule("quantized_decomposed::choose_qparams.tensor", choose_qparams),
    Rule("quantized_decomposed::choose_qparams_symmetric.tensor", choose_qparams_symmetric),
    Rule("aten::_int_mm.default", int_product),
    Rule(
        "aten::_int_mm.default",
        int_product_of_unsigned,
        target="onnxruntime",
        reason="its product with signed bytes saturates in between where a processor has no instruction for it",
    ),
    Rule("aten::_scaled_mm.default", scaled_product),
]
