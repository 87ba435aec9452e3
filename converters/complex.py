"""Elementwise arithmetic, functions and reductions of complex tensors, pairs of real tensors (see onnxplug.build.complexes).

The names of the rules are the operators' names with the prefix ``complex:``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex, from_pairs, to_pairs
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.complex_functions import (
    c_acos,
    c_acosh,
    c_asin,
    c_asinh,
    c_atanh,
    c_cosh,
    c_exp,
    c_expm1,
    c_log,
    c_log1p,
    c_log_base,
    c_pow,
    c_sigmoid,
    c_sinh,
    c_sqrt,
    c_tanh,
    via_i,
)
from onnxplug.converters.helpers.complex_pairs import (
    as_complex,
    both,
    c_abs,
    c_add,
    c_angle,
    c_conj,
    c_div,
    c_mul,
    c_reciprocal,
    c_scale,
    c_sgn,
    c_sub,
    c_times,
    part_dtype,
)
from onnxplug.converters.helpers.fill import filled
from onnxplug.converters.helpers.matrices import dtype_of
from onnxplug.converters.helpers.reductions import variance_arguments, variance_of
from onnxplug.converters.helpers.scans import is_empty, scan
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def unary(function: Callable[[GraphBuilder, Complex], Any]) -> Converter:
    """A converter for a function of one complex tensor."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        x = node.args[0]
        return function(g, x if isinstance(x, Complex) else as_complex(g, x, part_dtype(node)))

    convert.__name__ = convert.__qualname__ = getattr(function, "__name__", "convert").removeprefix("c_")
    return convert


def binary(function: Callable[[GraphBuilder, Complex, Complex], Complex]) -> Converter:
    """A converter for a function of two complex tensors."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        return function(g, *both(g, node, 0, 1))

    convert.__name__ = convert.__qualname__ = function.__name__.removeprefix("c_")
    return convert


def scaled_sum(sign: int, *, reverse: bool = False) -> Converter:
    """add, sub, rsub: with alpha."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        x, y = both(g, node, 0, 1)
        alpha = node.args[2] if len(node.args) > 2 else 1
        if reverse:
            x, y = y, x
        y = c_times(g, y, alpha)
        return c_add(g, x, y) if sign > 0 else c_sub(g, x, y)

    convert.__name__ = convert.__qualname__ = "add" if sign > 0 else "sub"
    return convert


def _ones(g: GraphBuilder, sizes: Sequence[Any], dtype: ir.DataType) -> Complex:
    return Complex(*(filled(g, number, sizes, dtype) for number in (1.0, 0.0)))


#: Powers to numbers, as torch computes them.
_POWERS: dict[complex, Callable[[GraphBuilder, Complex], Complex]] = {
    0: lambda g, x: _ones(g, g.dims(x.real), dtype_of(x.real)),
    1: lambda g, x: x,
    2: lambda g, x: c_mul(g, x, x),
    3: lambda g, x: c_mul(g, c_mul(g, x, x), x),
    0.5: c_sqrt,
    -0.5: lambda g, x: c_reciprocal(g, c_sqrt(g, x)),
    -1: c_reciprocal,
    -2: lambda g, x: c_reciprocal(g, c_mul(g, x, x)),
}


def power(g: GraphBuilder, node: FxNode) -> Complex:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    x, y = both(g, node, 0, 1)
    exponent = node.args[1]
    by_number = _POWERS.get(exponent) if isinstance(exponent, int | float | complex) else None
    return by_number(g, x) if by_number else c_pow(g, x, y)


def prod(g: GraphBuilder, node: FxNode) -> Complex:
    """prod(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    x = as_complex(g, node.args[0], part_dtype(node))
    return _product_along(g, node, Complex(g.reshape(x.real, [-1]), g.reshape(x.imag, [-1])), 0)


def prod_dim(g: GraphBuilder, node: FxNode) -> Complex:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    x = as_complex(g, node.args[0], part_dtype(node))
    rank = rank_of(x.real)
    if not rank:
        return x
    axis = normalize_axis(node.args[1], rank)
    total = _product_along(g, node, x, axis)
    if node.args[2]:
        total = Complex(unsqueeze(g, total.real, axis), unsqueeze(g, total.imag, axis))
    return total


def _product_along(g: GraphBuilder, node: FxNode, x: Complex, axis: int) -> Complex:
    """The product along an axis: the last of the running products, 1 of no elements."""
    dtype = part_dtype(node)
    rest = g.dims(x.real)
    size = rest.pop(axis)
    if 0 in [n for n in (size, *rest) if isinstance(n, int)]:
        return _ones(g, rest, dtype)
    if not isinstance(size, int):
        # One more element in front, because an empty axis has no last element.
        one = _ones(g, [*rest[:axis], 1, *rest[axis:]], dtype)
        x = Complex(*(g.op.Concat(a, b, axis=axis) for a, b in ((one.real, x.real), (one.imag, x.imag))))
    total = _running_product(g, x, axis)
    return Complex(*(g.op.Gather(part, g.const(-1), axis=axis) for part in (total.real, total.imag)))


def _running_product(g: GraphBuilder, x: Complex, axis: int) -> Complex:
    """The product of all elements up to each element, by a Scan over pairs."""

    def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
        product = to_pairs(g, c_mul(g, from_pairs(g, states[0]), from_pairs(g, item)))
        return [product], [g.op.Identity(product)]

    return from_pairs(g, scan(g, to_pairs(g, x), axis, [((1.0, 0.0), x.real.dtype)], step)[0])


def cumprod(g: GraphBuilder, node: FxNode) -> Complex:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    x = as_complex(g, node.args[0], part_dtype(node))
    rank = rank_of(x.real)
    return x if not rank or is_empty(x.real) else _running_product(g, x, normalize_axis(node.args[1], rank))


def variance(root: bool, with_mean: bool) -> Converter:
    """var, std, var_mean, std_mean: the mean of |z - mean|², real."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        x = node.args[0]
        dtype = x.real.dtype
        pairs = [variance_of(g, p, *variance_arguments(node), dtype) for p in (x.real, x.imag)]
        spread = g.op.Add(pairs[0][0], pairs[1][0])
        spread = g.op.Sqrt(spread) if root else spread
        return [spread, Complex(pairs[0][1], pairs[1][1])] if with_mean else spread

    convert.__name__ = convert.__qualname__ = ("std" if root else "var") + ("_mean" if with_mean else "")
    return convert


_UNARY: dict[str, Any] = {
    "exp": c_exp, "log": c_log, "sqrt": c_sqrt, "sinh": c_sinh, "cosh": c_cosh, "tanh": c_tanh,
    "asin": c_asin, "acos": c_acos, "asinh": c_asinh, "acosh": c_acosh, "atanh": c_atanh,
    "sin": via_i(c_sinh), "cos": via_i(c_cosh, back=False), "tan": via_i(c_tanh), "atan": via_i(c_atanh),
    "reciprocal": c_reciprocal, "sgn": c_sgn, "sigmoid": c_sigmoid, "log2": c_log_base(2.0), "log10": c_log_base(10.0),
    "rsqrt": lambda g, x: c_reciprocal(g, c_sqrt(g, x)), "square": lambda g, x: c_mul(g, x, x),
    "log1p": c_log1p, "expm1": c_expm1,
    "exp2": lambda g, x: c_exp(g, c_scale(g, x, g.const(math.log(2.0), x.real.dtype))),
    "conj": c_conj, "_conj": c_conj, "conj_physical": c_conj, "_conj_physical": c_conj, "resolve_conj": lambda g, x: x,
    "angle": c_angle, "abs": c_abs, "absolute": c_abs, "sign": c_sgn,
}  # fmt: skip
_PRIMS = """
exp log sqrt sinh cosh tanh asin acos asinh acosh atanh sin cos tan atan reciprocal sign rsqrt conj_physical
conj abs log2 log10 log1p expm1 exp2
""".split()
_PRIMS_BINARY: dict[str, Converter] = {
    "add": scaled_sum(1),
    "sub": scaled_sum(-1),
    "mul": binary(c_mul),
    "div": binary(c_div),
    "pow": power,
}
RULES: list[Rule] = [
    *[complex_rule(name, unary(function)) for name, function in _UNARY.items()],
    *[complex_rule(name, scaled_sum(1)) for name in ("add",)],
    *[complex_rule(name, scaled_sum(-1)) for name in ("sub", "subtract")],
    complex_rule("rsub", scaled_sum(-1, reverse=True)),
    *[complex_rule(name, binary(c_mul)) for name in ("mul", "multiply")],
    *[complex_rule(name, binary(c_div)) for name in ("div", "divide", "true_divide")],
    complex_rule("pow", power),
    complex_rule("prod.default", prod),
    complex_rule("prod.dim_int", prod_dim),
    complex_rule("cumprod.default", cumprod),
    complex_rule("var", variance(root=False, with_mean=False)),
    complex_rule("std", variance(root=True, with_mean=False)),
    complex_rule("var_mean", variance(root=False, with_mean=True)),
    complex_rule("std_mean", variance(root=True, with_mean=True)),
    *[Rule(f"complex:prims::{name}", unary(_UNARY[name])) for name in _PRIMS],
    *[Rule(f"complex:prims::{name}", convert) for name, convert in _PRIMS_BINARY.items()],
]
