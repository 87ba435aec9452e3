"""Normalisation layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze
from onnxplug.converters.helpers.dtypes import FLOAT, HALVES, fits_attribute
from onnxplug.converters.helpers.fill import filled
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.reductions import is_long, reduce
from onnxplug.converters.helpers.runtimes import has_kernel
from onnxplug.errors import Decline
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _wide(dtype: ir.DataType) -> ir.DataType:
    """Statistics of 16-bit floats are computed in float32, as in torch."""
    return FLOAT if dtype in HALVES else dtype


def layer_norm(g: GraphBuilder, node: FxNode) -> Value:
    """layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05, bool cudnn_enable=True) -> Tensor"""  # noqa: E501
    x, shape, weight, bias, eps = node.args[:5]
    # PyTorch accepts parameters in float32 with a tensor of 16-bit floats.
    dtype = next((v.dtype for v in (weight, bias) if v is not None), node.dtype)
    if is_long(g, x, range(rank_of(x) - len(shape), rank_of(x))) or not fits_attribute(dtype, eps):
        return _normalized(g, x, len(shape), weight, bias, eps, node.dtype)[0]
    if weight is None:
        weight = _ones(g, x, len(shape), dtype)
    normal = g.op.LayerNormalization(g.cast(x, dtype), weight, bias, axis=-len(shape), epsilon=eps)
    return g.cast(normal, node.dtype)


def _ones(g: GraphBuilder, x: Value, count: int, dtype: ir.DataType) -> Value:
    sizes = g.dims(x)[-count:]
    known = [size for size in sizes if isinstance(size, int)]
    return g.const(np.ones(known), dtype) if len(known) == count else filled(g, 1, sizes, dtype)


def layer_norm_plain(g: GraphBuilder, node: FxNode) -> Value:
    """layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05, bool cudnn_enable=True) -> Tensor"""  # noqa: E501
    x, shape, weight, bias, eps = node.args[:5]
    return _normalized(g, x, len(shape), weight, bias, eps, node.dtype)[0]


def _normalized(
    g: GraphBuilder, x: Value, count: int, weight: Any, bias: Any, eps: float, dtype: ir.DataType
) -> tuple[Value, Value, Value]:
    """The tensor normalised over its last ``count`` axes, the mean, and the reciprocal deviation."""
    inner = _wide(dtype)
    result, mean, _, inverse = _standardized(g, g.cast(x, inner), range(rank_of(x) - count, rank_of(x)), eps)
    if weight is not None:
        result = g.op.Mul(result, g.cast(weight, inner))
    if bias is not None:
        result = g.op.Add(result, g.cast(bias, inner))
    return g.cast(result, dtype), mean, inverse


def _standardized(g: GraphBuilder, x: Value, axes: Sequence[int], eps: float) -> tuple[Value, Value, Value, Value]:
    """The tensor less its mean over axes, divided by its deviation; the mean, the (biased) variance, the reciprocal deviation."""
    mean = reduce(g, "ReduceMean", x, axes, True)
    deviation = g.op.Sub(x, mean)
    variance = reduce(g, "ReduceMean", g.op.Mul(deviation, deviation), axes, True)
    inverse = g.op.Reciprocal(g.op.Sqrt(g.op.Add(variance, g.const(eps, x.dtype))))
    return g.op.Mul(deviation, inverse), mean, variance, inverse


def native_layer_norm(g: GraphBuilder, node: FxNode) -> list[Value]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    x, shape, weight, bias, eps = node.args
    specs = node.outputs
    result = list(_normalized(g, x, len(shape), weight, bias, eps, node.dtype))
    return [g.cast(v, s.dtype) if s is not None else v for v, s in zip(result, specs, strict=True)]


def rms_norm(g: GraphBuilder, node: FxNode) -> Value:
    """rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor

    The default of eps is the machine epsilon of the dtype that torch computes in.
    """
    x, shape, weight, eps = node.args
    inner = _wide(node.dtype)
    if eps is None:
        eps = float(ml_dtypes.finfo(inner.numpy()).eps)
    wide = g.cast(x, inner)
    axes = list(range(rank_of(x) - len(shape), rank_of(x)))
    mean = reduce(g, "ReduceMean", g.op.Mul(wide, wide), axes, True)
    result = g.op.Mul(wide, g.op.Reciprocal(g.op.Sqrt(g.op.Add(mean, g.const(eps, inner)))))
    if weight is not None:
        result = g.op.Mul(result, g.cast(weight, inner))
    return g.cast(result, node.dtype)


def rms_norm_operator(g: GraphBuilder, node: FxNode) -> Value:
    """rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor

    By ONNX's RMSNormalization, which needs a weight.
    """
    x, shape, weight, eps = node.args
    if weight is None or weight.dtype != x.dtype or not has_kernel(g, "RMSNormalization", node.dtype):
        raise Decline("no weight, or a dtype that RMSNormalization has no kernel for")
    if eps is None:
        eps = float(ml_dtypes.finfo(_wide(node.dtype).numpy()).eps)
    if not fits_attribute(node.dtype, eps):
        raise Decline("an epsilon that is no float32")
    return g.op.RMSNormalization(x, weight, axis=-len(shape), epsilon=eps)


def group_norm(g: GraphBuilder, node: FxNode) -> Value:
    """group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05, bool cudnn_enabled=True) -> Tensor"""  # noqa: E501
    x, groups, weight, bias, eps = node.args[:5]
    return _group_norm(g, x, groups, weight, bias, eps)


def group_norm_operator(g: GraphBuilder, node: FxNode) -> Value:
    """group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05, bool cudnn_enabled=True) -> Tensor

    By ONNX's GroupNormalization, which has a scale and a bias for each channel since opset 21.
    """  # noqa: E501
    x, groups, weight, bias, eps = node.args[:5]
    if not fits_attribute(node.dtype, eps):
        raise Decline("an epsilon that is no float32")
    channels = g.dim(x, 1)
    scale = _row(g, channels, 1.0, node.dtype) if weight is None else g.cast(weight, node.dtype)
    shift = _row(g, channels, 0.0, node.dtype) if bias is None else g.cast(bias, node.dtype)
    return g.op.GroupNormalization(x, scale, shift, num_groups=groups, epsilon=eps)


def _group_norm(g: GraphBuilder, x: Value, groups: int, weight: Any, bias: Any, eps: float) -> Value:
    """By InstanceNormalization of the groups, seen as channels."""
    dtype = x.dtype
    assert dtype is not None
    inner = _wide(dtype)
    rows = _grouped(g, g.cast(x, inner), groups)
    if is_long(g, rows, [2]) or not fits_attribute(inner, eps):
        normal = _standardized(g, rows, [2], eps)[0]
    else:
        ones, zeros = g.const(np.ones(groups), inner), g.const(np.zeros(groups), inner)
        normal = g.op.InstanceNormalization(rows, ones, zeros, epsilon=eps)
    result = g.reshape(normal, list(x.shape or ())) if _reshapes(x) else g.op.Reshape(normal, g.shape(x))
    return g.cast(_affine(g, result, weight, bias, inner), dtype)


def _grouped(g: GraphBuilder, x: Value, groups: int) -> Value:
    """The tensor as [batch, groups, elements]."""
    sizes = list(x.shape or ())[1:]
    # A size that is inferred is an error of ONNX Runtime where the batch is empty.
    length = -1 if not _reshapes(x) else math.prod(size for size in sizes if isinstance(size, int)) // groups
    return g.op.Reshape(x, g.const([0, groups, length]))


def _reshapes(x: Value) -> bool:
    """Whether at most the batch is dynamic, so that a constant shape restores the tensor's shape."""
    return all(isinstance(d, int) for d in list(x.shape or ())[1:])


def _affine(g: GraphBuilder, x: Value, weight: Any, bias: Any, dtype: ir.DataType) -> Value:
    """A weight and a bias for each channel."""
    shape = [-1] + [1] * (rank_of(x) - 2)
    if weight is not None:
        x = g.op.Mul(x, g.op.Reshape(g.cast(weight, dtype), g.const(shape)))
    if bias is not None:
        x = g.op.Add(x, g.op.Reshape(g.cast(bias, dtype), g.const(shape)))
    return x


def native_group_norm(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps) -> (Tensor, Tensor, Tensor)

    With the mean and the reciprocal deviation of each group, which are removed where nothing reads them.
    """  # noqa: E501
    x, weight, bias, _, _, _, groups, eps = node.args
    spec = node.outputs[1]
    assert spec is not None
    inner = _wide(spec.dtype)
    rows = _grouped(g, g.cast(x, inner), groups)
    _, mean, _, inverse = _standardized(g, rows, [2], eps)
    statistics = [g.cast(squeeze(g, v, 2), spec.dtype) for v in (mean, inverse)]
    return [_group_norm(g, x, groups, weight, bias, eps), *statistics]


def instance_norm(g: GraphBuilder, node: FxNode) -> Value:
    """instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool use_input_stats, float momentum, float eps, bool cudnn_enabled) -> Tensor"""  # noqa: E501
    x, weight, bias, mean, variance, use_input, _, eps = node.args[:8]
    if not use_input and mean is not None:
        return _batch_norm(g, x, weight, bias, mean, variance, eps)
    if is_long(g, x, range(2, rank_of(x))) or not fits_attribute(node.dtype, eps):
        normal = _standardized(g, x, range(2, rank_of(x)), eps)[0]
        return g.cast(_affine(g, normal, weight, bias, node.dtype), node.dtype)
    channels = g.dim(x, 1)
    ones = operand(g, weight, node.dtype) if weight is not None else _row(g, channels, 1.0, node.dtype)
    zeros = operand(g, bias, node.dtype) if bias is not None else _row(g, channels, 0.0, node.dtype)
    return g.op.InstanceNormalization(x, ones, zeros, epsilon=eps)


def _row(g: GraphBuilder, channels: int | Value, value: float, dtype: ir.DataType) -> Value:
    """A per-channel vector, shaped to broadcast against the tensor."""
    if isinstance(channels, int):
        return g.const(np.full(channels, value), dtype)
    return g.op.Expand(g.const(value, dtype), g.as_vector(channels))


def _batch_norm(g: GraphBuilder, x: Value, weight: Any, bias: Any, mean: Value, variance: Value, eps: float) -> Value:
    dtype = x.dtype
    assert dtype is not None and mean.dtype is not None
    weight = weight if weight is not None else _row(g, g.dim(mean, 0), 1.0, mean.dtype)
    bias = bias if bias is not None else _row(g, g.dim(mean, 0), 0.0, mean.dtype)
    inner = _wide(dtype)
    x, weight, bias, mean, variance = (g.cast(v, inner) for v in (x, weight, bias, mean, variance))
    if not fits_attribute(inner, eps):
        variance, eps = g.op.Add(variance, g.const(eps, inner)), 0.0
    return g.cast(g.op.BatchNormalization(x, weight, bias, mean, variance, epsilon=eps), dtype)


def batch_norm(g: GraphBuilder, node: FxNode) -> Value:
    """batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> Tensor"""  # noqa: E501
    x, weight, bias, mean, variance, training, _, eps = node.args[:8]
    if training or mean is None:
        return _by_batch(g, x, weight, bias, eps)[0]
    return _batch_norm(g, x, weight, bias, mean, variance, eps)


def _by_batch(g: GraphBuilder, x: Value, weight: Any, bias: Any, eps: float) -> tuple[Value, Value, Value]:
    """The tensor normalised by the batch's mean and (biased) variance of each channel; and the mean and variance."""
    dtype = x.dtype
    assert dtype is not None
    inner = _wide(dtype)
    axes = [0, *range(2, rank_of(x))]
    result, mean, variance, _ = _standardized(g, g.cast(x, inner), axes, eps)
    result = g.cast(_affine(g, result, weight, bias, inner), dtype)
    return result, squeeze(g, mean, *axes), squeeze(g, variance, *axes)


def native_batch_norm_inference(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    x, weight, bias, mean, variance, _, eps = node.args
    empty = g.const(np.zeros(0), mean.dtype)
    return _as_specified(g, node, [_batch_norm(g, x, weight, bias, mean, variance, eps), empty, empty])


def native_batch_norm(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)

    In training the results include the batch's mean and reciprocal deviation.
    """  # noqa: E501
    named = node.kwargs
    x, weight, bias, eps = (named[key] for key in ("input", "weight", "bias", "eps"))
    mean, variance = named.get("running_mean"), named.get("running_var")
    if not named["training"] and mean is not None and variance is not None:
        empty = g.const(np.zeros(0), mean.dtype)
        return _as_specified(g, node, [_batch_norm(g, x, weight, bias, mean, variance, eps), empty, empty])
    result, batch_mean, batch_variance = _by_batch(g, x, weight, bias, eps)
    inverse = g.op.Reciprocal(g.op.Sqrt(g.op.Add(batch_variance, g.const(eps, batch_variance.dtype))))
    specs = node.outputs[1:]
    return [result, *(g.cast(v, s.dtype) for v, s in zip((batch_mean, inverse), specs, strict=True) if s is not None)]


def native_batch_norm_functional(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)

    The running variance is updated with the batch's unbiased variance.
    """  # noqa: E501
    x, weight, bias, mean, variance, training, momentum, eps = node.args
    if not training:
        spec = node.outputs[1]
        empty = g.const(np.zeros(0), spec.dtype if spec is not None else mean.dtype)
        return _as_specified(
            g, node, [_batch_norm(g, x, weight, bias, mean, variance, eps), empty, empty, mean, variance]
        )
    return _as_specified(g, node, _updating(g, x, weight, bias, mean, variance, momentum, eps))


def batch_norm_with_update(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_batch_norm_with_update_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)

    The fourth result is room for cuDNN, empty on the CPU.
    """  # noqa: E501
    result, batch_mean, inverse, *updated = _updating(g, *node.args)
    spec = node.outputs[3]
    room = g.const(np.zeros(0), spec.dtype if spec is not None else result.dtype)
    return _as_specified(g, node, [result, batch_mean, inverse, room, *updated])


def _updating(
    g: GraphBuilder, x: Value, weight: Any, bias: Any, mean: Value, variance: Value, momentum: float, eps: float
) -> list[Value]:
    """The tensor normalised by the batch, its mean and reciprocal deviation, and the running statistics, updated."""
    result, batch_mean, batch_variance = _by_batch(g, x, weight, bias, eps)
    inner = batch_mean.dtype
    assert inner is not None and mean.dtype is not None
    count: Any = 1
    for axis in (0, *range(2, rank_of(x))):
        size = g.dim(x, axis)
        count = count * size if isinstance(count, int) and isinstance(size, int) else g.op.Mul(count, size)
    number = operand(g, count, inner)
    unbiased = g.op.Mul(batch_variance, g.op.Div(number, g.op.Sub(number, g.const(1.0, inner))))
    keep, new = g.const(1.0 - momentum, inner), g.const(momentum, inner)
    updated = [
        g.cast(g.op.Add(g.op.Mul(g.cast(old, inner), keep), g.op.Mul(fresh, new)), mean.dtype)
        for old, fresh in ((mean, batch_mean), (variance, unbiased))
    ]
    inverse = g.op.Reciprocal(g.op.Sqrt(g.op.Add(batch_variance, g.const(eps, inner))))
    return [result, batch_mean, inverse, *updated]


def _as_specified(g: GraphBuilder, node: FxNode, values: Sequence[Value]) -> list[Value | None]:
    """Converts each result to the dtype of torch's: statistics of 16-bit floats are float32."""
    return [g.cast(v, s.dtype) if s is not None else v for v, s in zip(values, node.outputs, strict=True)]


RULES: list[Rule] = [
    Rule("aten::layer_norm.default", layer_norm, opset=(17, None)),
    Rule("aten::layer_norm.default", layer_norm_plain, opset=(None, 16)),
    Rule("aten::native_layer_norm.default", native_layer_norm),
    Rule("aten::rms_norm.default", rms_norm_operator, opset=(23, None)),
    Rule("aten::rms_norm.default", rms_norm),
    Rule("aten::group_norm.default", group_norm_operator, opset=(21, None)),
    Rule("aten::group_norm.default", group_norm, opset=(None, 20)),
    Rule(
        "aten::group_norm.default",
        group_norm,
        opset=(21, None),
        target="onnxruntime",
        reason="it has no kernel for GroupNormalization and runs the body of that, node by node",
    ),
    Rule("aten::native_group_norm.default", native_group_norm),
    Rule("aten::instance_norm.default", instance_norm),
    Rule("aten::batch_norm.default", batch_norm),
    Rule("aten::_native_batch_norm_legit_no_training.default", native_batch_norm_inference),
    Rule("aten::_native_batch_norm_legit_functional.default", native_batch_norm_functional),
    Rule("aten::_batch_norm_with_update_functional.default", batch_norm_with_update),
    Rule("aten::_native_batch_norm_legit.no_stats", native_batch_norm),
    Rule("aten::native_batch_norm.default", native_batch_norm),
]
