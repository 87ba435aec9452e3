"""Activation functions and softmax."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import normalize_axis, rank_of
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, HALVES, INT64, fits_attribute
from onnxplug.converters.helpers.elementary import expm1_of
from onnxplug.converters.helpers.error_function import erf
from onnxplug.converters.helpers.exactness import KERNEL_FORGETS_NAN
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.real import Real
from onnxplug.converters.helpers.reductions import reduced
from onnxplug.converters.helpers.runtimes import LOW_HALVES_ARE_SIGNED, computed_in, has_kernel
from onnxplug.converters.helpers.selection import select
from onnxplug.converters.helpers.softmax import zero_hidden_rows
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def simple(op_type: str, **attributes: Any) -> Converter:
    """An activation with one operator in ONNX and no parameters."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        return getattr(g.op, op_type)(node.args[0], **attributes)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def relu(g: GraphBuilder, node: FxNode) -> Value:
    """relu(Tensor self) -> Tensor"""
    x = node.args[0]
    if node.dtype.is_integer() and not has_kernel(g, "Relu", node.dtype):
        return compute(g, "Max", node.dtype, x, 0)
    return g.op.Relu(x)


def clipped(low: float, high: float) -> Converter:
    """Clamps the elements to [low, high]; relu6 is one case."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        return _clip(g, node.args[0], low, high)

    convert.__name__ = convert.__qualname__ = "clipped"
    return convert


def _clip(g: GraphBuilder, x: Value, low: float, high: float) -> Value:
    """ONNX Runtime expands Clip of bfloat16 to Where, which takes bfloat16 since opset 16."""
    dtype = x.dtype
    assert dtype is not None
    if dtype == INT64 and LOW_HALVES_ARE_SIGNED.concerns(g):
        return compute(g, "Min", dtype, compute(g, "Max", dtype, x, int(low)), int(high))
    inner = FLOAT if dtype == ir.DataType.BFLOAT16 and g.opset < 16 else dtype
    return g.cast(g.op.Clip(g.cast(x, inner), g.const(low, inner), g.const(high, inner)), dtype)


def hardtanh(g: GraphBuilder, node: FxNode) -> Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    x, low, high = node.args
    return _clip(g, x, low, high)


def gelu(g: GraphBuilder, node: FxNode) -> Value:
    """gelu(Tensor self, *, str approximate="none") -> Tensor"""
    x, approximate = node.args
    inner = computed_in(g, "Gelu", node.dtype)
    if not has_kernel(g, "Gelu", inner):
        return gelu_plain(g, node)
    return g.cast(g.op.Gelu(g.cast(x, inner), approximate=approximate), node.dtype)


def gelu_plain(g: GraphBuilder, node: FxNode) -> Value:
    """gelu(Tensor self, *, str approximate="none") -> Tensor

    x/2 (1 + erf(x/√2)), or with tanh(√(2/π) (x + 0.044715 x³)) (Hendrycks and Gimpel, arXiv 1606.08415).
    """
    x, approximate = node.args
    dtype = FLOAT if node.dtype in HALVES else node.dtype
    x = g.cast(x, dtype)
    if approximate == "tanh":
        cube = g.op.Mul(g.op.Mul(x, x), x)
        inside = g.op.Mul(g.op.Add(x, g.op.Mul(cube, g.const(0.044715, dtype))), g.const(math.sqrt(2 / math.pi), dtype))
        bend = g.op.Tanh(inside)
    else:
        scaled = g.op.Mul(x, g.const(1 / math.sqrt(2), dtype))
        bend = erf(Real(g, scaled, dtype)).value
    result = g.op.Mul(g.op.Mul(x, g.const(0.5, dtype)), g.op.Add(bend, g.const(1.0, dtype)))
    return g.cast(result, node.dtype)


def silu(g: GraphBuilder, node: FxNode) -> Value:
    """silu(Tensor self) -> Tensor"""
    x = node.args[0]
    return g.op.Mul(x, g.op.Sigmoid(x))


def elu(g: GraphBuilder, node: FxNode) -> Value:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    x, alpha, scale, input_scale = node.args
    if scale == 1 and input_scale == 1 and fits_attribute(node.dtype, alpha):
        return g.op.Elu(x, alpha=float(alpha))
    dtype = node.dtype
    if dtype == DOUBLE:
        return _elu_of_doubles(g, x, float(alpha), float(scale), float(input_scale))
    negative = g.op.Mul(g.op.Sub(g.op.Exp(g.op.Mul(x, g.const(input_scale, dtype))), g.const(1.0, dtype)),
                        g.const(alpha * scale, dtype))  # fmt: skip
    positive = g.op.Mul(x, g.const(scale, dtype))
    result = g.op.Where(g.op.Greater(x, g.const(0.0, dtype)), positive, negative)
    return result


def _elu_of_doubles(g: GraphBuilder, x: Value, alpha: float, scale: float, input_scale: float = 1.0) -> Value:
    """scale * x where x is positive, elsewhere scale * alpha * (exp(input_scale * x) - 1); attributes would be float32."""
    zero = g.const(0.0, DOUBLE)
    inside = g.op.Mul(g.op.Min(x, zero), g.const(input_scale, DOUBLE))
    low = g.op.Mul(expm1_of(g, inside), g.const(alpha * scale, DOUBLE))
    return g.op.Where(g.op.Greater(x, zero), g.op.Mul(x, g.const(scale, DOUBLE)), low)


def selu(g: GraphBuilder, node: FxNode) -> Value:
    """selu(Tensor self) -> Tensor

    The factors are those of Klambauer et al., arXiv 1706.02515.
    """
    x = node.args[0]
    if node.dtype != DOUBLE:
        return g.op.Selu(x)
    return _elu_of_doubles(g, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def celu(g: GraphBuilder, node: FxNode) -> Value:
    """celu(Tensor self, Scalar alpha=1.) -> Tensor"""
    x, alpha = node.args
    # ONNX defines Celu for float only.
    if node.dtype == DOUBLE:
        zero, scale = g.const(0.0, node.dtype), g.const(float(alpha), node.dtype)
        low = g.op.Mul(scale, expm1_of(g, g.op.Div(g.op.Min(x, zero), scale)))
        return g.op.Add(g.op.Max(x, zero), low)
    return g.cast(g.op.Celu(g.cast(x, FLOAT), alpha=float(alpha)), node.dtype)


def leaky_relu(g: GraphBuilder, node: FxNode) -> Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    x, slope = node.args
    if fits_attribute(node.dtype, slope):
        return g.op.LeakyRelu(x, alpha=float(slope))
    is_positive = g.op.Greater(x, g.const(0.0, node.dtype))
    return g.op.Where(is_positive, x, g.op.Mul(x, g.const(slope, node.dtype)))


def prelu(g: GraphBuilder, node: FxNode) -> Value:
    """prelu(Tensor self, Tensor weight) -> Tensor

    One weight per channel; the channels are axis 1.
    """
    x, weight = node.args
    if rank_of(weight) == 1 and rank_of(x) > 2:
        weight = g.op.Reshape(weight, g.const([-1] + [1] * (rank_of(x) - 2)))
    elif rank_of(x) < 2 and rank_of(weight):
        weight = g.reshape(weight, []) if not rank_of(x) else weight
    return g.op.PRelu(x, weight)


def hardsigmoid(g: GraphBuilder, node: FxNode) -> Value:
    """hardsigmoid(Tensor self) -> Tensor"""
    x = node.args[0]
    if node.dtype != DOUBLE:
        return g.op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    low, three, six = (g.const(number, DOUBLE) for number in (0.0, 3.0, 6.0))
    return g.op.Div(g.op.Clip(g.op.Add(x, three), low, six), six)


def hardswish(g: GraphBuilder, node: FxNode) -> Value:
    """hardswish(Tensor self) -> Tensor"""
    return hardswish_plain(g, node) if node.dtype == DOUBLE else g.op.HardSwish(node.args[0])


def hardswish_plain(g: GraphBuilder, node: FxNode) -> Value:
    """hardswish(Tensor self) -> Tensor"""
    x = node.args[0]
    return g.op.Mul(x, hardsigmoid(g, node))


def hardshrink(g: GraphBuilder, node: FxNode) -> Value:
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    x, bound = node.args
    inside = g.op.LessOrEqual(g.op.Abs(x), g.const(bound, node.dtype))
    return g.op.Where(inside, g.const(0.0, node.dtype), x)


def softshrink(g: GraphBuilder, node: FxNode) -> Value:
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    x, bound = node.args
    return g.op.Sub(x, _clip(g, x, -bound, bound))


def threshold(g: GraphBuilder, node: FxNode) -> Value:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    x, bound, value = node.args
    inner = computed_in(g, "LessOrEqual", node.dtype)
    below = g.op.LessOrEqual(g.cast(x, inner), g.const(bound, inner))
    return select(g, below, value, x, node.dtype)


def softplus(g: GraphBuilder, node: FxNode) -> Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    x, beta, bound = node.args
    dtype = node.dtype
    scaled = g.op.Mul(x, g.const(beta, dtype))
    smooth = g.op.Div(g.op.Softplus(scaled), g.const(beta, dtype))
    return g.op.Where(g.op.Greater(scaled, g.const(bound, dtype)), x, smooth)


def mish(g: GraphBuilder, node: FxNode) -> Value:
    """mish(Tensor self) -> Tensor"""
    x = node.args[0]
    return g.op.Mul(x, g.op.Tanh(g.op.Softplus(x)))


def glu(g: GraphBuilder, node: FxNode) -> Value:
    """glu(Tensor self, int dim=-1) -> Tensor"""
    x, axis = node.args
    axis = normalize_axis(axis, rank_of(x))
    size = g.dim(x, axis)
    half = size // 2 if isinstance(size, int) else g.op.Div(size, g.const(2))
    a, b = g.op.Split(x, g.vector([half, half]), axis=axis, _outputs=2)
    return g.op.Mul(a, g.op.Sigmoid(b))


def log_sigmoid(g: GraphBuilder, node: FxNode) -> Value:
    """log_sigmoid(Tensor self) -> Tensor"""
    return g.op.Neg(g.op.Softplus(g.op.Neg(node.args[0])))


def softmax_of(op_type: str) -> Converter:
    """softmax, log_softmax: converted to the result's dtype first; halves are computed in float."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axis = node.args[:2]
        inner = FLOAT if node.dtype in HALVES else node.dtype
        x = operand(g, x, inner)
        if not rank_of(x):
            one = g.op.Exp(g.op.Sub(x, x))  # 1 for finite elements, NaN for others.
            return g.cast(one if op_type == "Softmax" else g.op.Log(one), node.dtype)
        return g.cast(getattr(g.op, op_type)(x, axis=normalize_axis(axis, rank_of(x))), node.dtype)

    convert.__name__ = convert.__qualname__ = "softmax" if op_type == "Softmax" else "log_softmax"
    return convert


def log_softmax_exact(g: GraphBuilder, node: FxNode) -> Value:
    """log_softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor

    For doubles, by the definition: the result is NaN where ONNX Runtime's kernel gives -inf.
    """
    x, axis = node.args[:2]
    x = operand(g, x, node.dtype)
    axis = normalize_axis(axis, rank_of(x))
    shifted = g.op.Sub(x, reduced(g, "ReduceMax", x, axis, True, node.dtype))
    total = reduced(g, "ReduceSum", g.op.Exp(shifted), axis, True, node.dtype)
    return g.op.Sub(shifted, g.op.Log(total))


def _of_doubles(node: FxNode) -> bool:
    return node.dtype == DOUBLE and bool(rank_of(node.args[0]))


def safe_softmax(g: GraphBuilder, node: FxNode) -> Value:
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor

    A row in which every element is −inf gives zeros.
    """
    x, axis = node.args[:2]
    x = operand(g, x, node.dtype)
    axis = normalize_axis(axis, rank_of(x))
    return zero_hidden_rows(g, x, g.op.Softmax(x, axis=axis), axis)


RULES: list[Rule] = [
    Rule("aten::relu.default", relu),
    Rule("aten::relu6.default", clipped(0.0, 6.0)),
    Rule("aten::hardtanh.default", hardtanh),
    Rule("aten::gelu.default", gelu, opset=(20, None)),
    Rule("aten::gelu.default", gelu_plain, opset=(None, 19)),
    Rule("aten::silu.default", silu),
    Rule("aten::elu.default", elu),
    Rule("aten::selu.default", selu),
    Rule("aten::celu.default", celu),
    Rule("aten::leaky_relu.default", leaky_relu),
    Rule("aten::prelu.default", prelu),
    Rule("aten::_prelu_kernel.default", prelu),
    Rule("aten::hardsigmoid.default", hardsigmoid),
    Rule("aten::hardswish.default", hardswish, opset=(14, None)),
    Rule("aten::hardswish.default", hardswish_plain, opset=(None, 13)),
    Rule("aten::hardshrink.default", hardshrink),
    Rule("aten::softshrink.default", softshrink),
    Rule("aten::threshold.default", threshold),
    Rule("aten::softplus.default", softplus),
    Rule("aten::mish.default", mish),
    Rule("aten::glu.default", glu),
    Rule("aten::log_sigmoid.default", log_sigmoid),
    Rule("aten::softmax.int", softmax_of("Softmax")),
    Rule("aten::_softmax.default", softmax_of("Softmax")),
    Rule("aten::special_softmax.default", softmax_of("Softmax")),
    Rule("aten::log_softmax.int", softmax_of("LogSoftmax")),
    Rule("aten::_log_softmax.default", softmax_of("LogSoftmax")),
    Rule("aten::special_log_softmax.default", softmax_of("LogSoftmax")),
    *[
        Rule(f"aten::{name}", log_softmax_exact, when=_of_doubles, **KERNEL_FORGETS_NAN)
        for name in ("log_softmax.int", "_log_softmax.default", "special_log_softmax.default")
    ],
    Rule("aten::_safe_softmax.default", safe_softmax),
]
