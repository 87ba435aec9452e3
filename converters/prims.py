"""prims: the operators that torch's reference decompositions consist of. Most are aten operators under other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import unsqueeze
from onnxplug.converters.helpers.broadcasting import expand_to
from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.converters.helpers.exactness import (
    SKIPS_NAN,
    THROUGH_DOUBLE,
    WRONG_AND_SLOW,
    of_floats,
    of_wide_integers,
    sums_integers,
)
from onnxplug.converters.helpers.reductions import reduced, variance_of
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def broadcast_in_dim(g: GraphBuilder, node: FxNode) -> Value:
    """broadcast_in_dim(Tensor(a) a, SymInt[] shape, int[] broadcast_dimensions) -> Tensor(a)

    Axis i of the tensor becomes axis broadcast_dimensions[i]; the others are new.
    """
    x, shape, axes = node.args
    new = [a for a in range(len(shape)) if a not in axes]
    return expand_to(g, unsqueeze(g, x, *new) if new else x, node.shape, shape)


def to_result_shape(g: GraphBuilder, node: FxNode) -> Value:
    """collapse(Tensor a, int start, int end) -> Tensor"""
    return g.reshape(node.args[0], node.shape)


def squeeze(g: GraphBuilder, node: FxNode) -> Value:
    """squeeze(Tensor(a) a, int[] dimensions) -> Tensor(a)"""
    x, axes = node.args
    return g.op.Squeeze(x, g.const(list(axes), INT64)) if axes else x


def transpose(g: GraphBuilder, node: FxNode) -> Value:
    """transpose(Tensor(a) a, int[] permutation) -> Tensor(a)"""
    x, order = node.args
    return g.op.Transpose(x, perm=list(order)) if order else x


def reduction(op_type: str, exact: bool = False) -> Converter:
    """sum, prod, amax, amin: over non-negative axes."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axes = node.args[:2]
        if axes is not None and not axes:
            return g.cast(x, node.dtype)
        return reduced(g, op_type, x, axes, False, node.dtype, exact)

    convert.__name__ = convert.__qualname__ = f"{op_type.lower()}{'_exact' if exact else ''}"
    return convert


def var(g: GraphBuilder, node: FxNode) -> Value:
    """var(Tensor inp, int[]? dims, float? correction=1, *, ScalarType? output_dtype=None) -> Tensor"""
    x, axes, correction = node.args[:3]
    return variance_of(g, x, axes, 1.0 if correction is None else correction, False, node.dtype)[0]


def iota(g: GraphBuilder, node: FxNode) -> Value:
    """iota(SymInt length, *, SymInt start, SymInt step, ScalarType dtype, Device device, bool requires_grad) -> Tensor"""
    length, start, step = node.args[:3]
    steps = g.op.Range(g.const(0), g.as_scalar(length), g.const(1))
    return g.cast(g.op.Add(g.as_scalar(start), g.op.Mul(steps, g.as_scalar(step))), node.dtype)


def cbrt(g: GraphBuilder, node: FxNode) -> Value:
    """cbrt(Tensor self) -> Tensor"""
    x = node.args[0]
    root = g.op.Pow(g.op.Abs(x), g.const(1.0 / 3.0, node.dtype))
    return g.op.Mul(g.op.Sign(x), root)


def first_argument(g: GraphBuilder, node: FxNode) -> Value:
    """view_of(Tensor(a) a) -> Tensor(a)"""
    return node.args[0]


def extreme_value(largest: bool) -> Converter:
    """maximum_value, minimum_value: of a dtype."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        import torch

        dtype = node.args[0]
        if dtype is torch.bool:
            return largest
        if dtype.is_floating_point:
            return float("inf") if largest else float("-inf")
        limits = torch.iinfo(dtype)
        return limits.max if largest else limits.min

    convert.__name__ = convert.__qualname__ = "maximum_value" if largest else "minimum_value"
    return convert


def _delegate(overload: str) -> Converter:
    """The converter of an aten overload whose leading arguments are the prim's; missing arguments take their defaults."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        return g.convert(node.as_operator(overload))

    convert.__name__ = convert.__qualname__ = overload.rpartition("::")[2].partition(".")[0]
    return convert


_UNARY: Sequence[str] = (
    "abs acos acosh asin asinh atan atanh cos cosh bitwise_not ceil digamma erf erfc exp expm1 exp2 floor isfinite lgamma "
    "log log1p log2 log10 neg reciprocal round rsqrt sign signbit sin sinh sqrt tan tanh trunc clone"
).split()
_SPECIAL = {
    "bessel_i0": "i0", "bessel_i0e": "special_i0e", "bessel_i1": "special_i1", "bessel_i1e": "special_i1e",
    "bessel_j0": "special_bessel_j0", "bessel_j1": "special_bessel_j1", "erf_inv": "erfinv", "erfcx": "special_erfcx",
    "ndtri": "special_ndtri", "spherical_bessel_j0": "special_spherical_bessel_j0", "zeta": "special_zeta",
    "igamma": "igamma", "igammac": "igammac",
}  # fmt: skip
_BINARY = {
    "add": "add.Tensor", "sub": "sub.Tensor", "mul": "mul.Tensor", "pow": "pow.Tensor_Tensor",
    "atan2": "atan2.default", "bitwise_and": "bitwise_and.Tensor", "bitwise_or": "bitwise_or.Tensor",
    "bitwise_xor": "bitwise_xor.Tensor", "eq": "eq.Tensor", "ne": "ne.Tensor", "lt": "lt.Tensor", "le": "le.Tensor",
    "gt": "gt.Tensor", "ge": "ge.Tensor", "fmax": "fmax.default", "fmin": "fmin.default", "fmod": "fmod.Tensor",
    "gcd": "gcd.default", "hypot": "hypot.default", "maximum": "maximum.default", "minimum": "minimum.default",
    "nextafter": "nextafter.default", "remainder": "remainder.Tensor", "frexp": "frexp.Tensor",
    "shift_left": "bitwise_left_shift.Tensor", "shift_right_arithmetic": "bitwise_right_shift.Tensor",
    "where": "where.self", "cat": "cat.default", "reshape": "reshape.default", "real": "real.default",
}  # fmt: skip


def div(g: GraphBuilder, node: FxNode) -> Value:
    """div(Tensor self, Tensor other) -> Tensor

    For integers the quotient is rounded towards zero.
    """
    x, y = node.args
    return compute(g, "Div", node.dtype, x, y)


def copy_to(g: GraphBuilder, node: FxNode) -> Value:
    """copy_to(Tensor(a!) a, Tensor b) -> Tensor(a!)"""
    target, source = node.args
    return expand_to(g, g.cast(source, node.dtype), node.shape, g.dims(target))


def item(g: GraphBuilder, node: FxNode) -> Value:
    """item(Tensor a) -> Scalar"""
    return g.reshape(node.args[0], [])


RULES: list[Rule] = [
    *[Rule(f"prims::{name}.default", _delegate(f"aten::{name}.default")) for name in _UNARY],
    *[Rule(f"prims::{name}.default", _delegate(f"aten::{aten}.default")) for name, aten in _SPECIAL.items()],
    *[Rule(f"prims::{name}.default", _delegate(f"aten::{aten}")) for name, aten in _BINARY.items()],
    Rule("prims::div.default", div),
    Rule("prims::broadcast_in_dim.default", broadcast_in_dim),
    *[Rule(f"prims::{name}.default", to_result_shape) for name in ("collapse", "collapse_view", "split_dim")],
    Rule("prims::squeeze.default", squeeze),
    Rule("prims::transpose.default", transpose),
    Rule("prims::rev.default", "onnxplug.converters.slicing:flip"),
    Rule("prims::sum.default", reduction("ReduceSum")),
    Rule("prims::prod.default", reduction("ReduceProd")),
    Rule("prims::amax.default", reduction("ReduceMax")),
    Rule("prims::amin.default", reduction("ReduceMin")),
    Rule("prims::sum.default", reduction("ReduceSum", exact=True), when=sums_integers, **WRONG_AND_SLOW),
    Rule("prims::prod.default", reduction("ReduceProd", exact=True), when=of_wide_integers, **THROUGH_DOUBLE),
    *[
        Rule(f"prims::{name}.default", reduction(op_type, exact=True), when=of_floats, **SKIPS_NAN)
        for name, op_type in (("amax", "ReduceMax"), ("amin", "ReduceMin"))
    ],
    Rule("prims::var.default", var),
    Rule("prims::iota.default", iota),
    Rule("prims::cbrt.default", cbrt),
    Rule("prims::view_of.default", first_argument),
    Rule("prims::device_put.default", first_argument),
    Rule("prims::copy_to.default", copy_to),
    Rule("prims::item.default", item),
    Rule("prims::maximum_value.default", extreme_value(largest=True)),
    Rule("prims::minimum_value.default", extreme_value(largest=False)),
]
