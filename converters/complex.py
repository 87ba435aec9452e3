"""Complex numbers, as two real tensors each (see onnxplug.build.complexes).

Rules stand under the operator's name with the prefix ``complex:``. What moves elements about, or is linear in its one
complex argument, goes through the rules for real tensors part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import PART_DTYPE, Complex, complex_constant, from_pairs, to_pairs
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.casts import convert_dtype
from onnxplug.converters.helpers.complex_functions import (
    c_acos,
    c_acosh,
    c_asin,
    c_asinh,
    c_atanh,
    c_cosh,
    c_exp,
    c_log,
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
    bilinear,
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
)
from onnxplug.converters.helpers.fill import filled as fill
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.reductions import reduce, variance_arguments, variance_of
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def part_dtype(node: FxNode) -> ir.DataType:
    """The element type of the parts of a node's complex result."""
    return PART_DTYPE[node.dtype]


def both(g: GraphBuilder, node: FxNode, *positions: int) -> list[Complex]:
    """Arguments as complex tensors in the result's precision."""
    return [as_complex(g, node.args[p], part_dtype(node)) for p in positions]


# -- converters --------------------------------------------------------------------------------------------------------


def partwise(g: GraphBuilder, node: FxNode) -> Any:
    """An operator that moves elements about: once for the real parts, once for the imaginary ones."""
    real, imag = node.part("real"), node.part("imag")
    if not g.has_rule(real):
        # Then its decomposition, whose operators come back here one by one.
        raise Decline("no rule for real tensors")
    parts = [g.convert(part) for part in (real, imag)]
    if isinstance(parts[0], list | tuple):
        return [Complex(a, b) for a, b in zip(*parts, strict=True)]
    return Complex(*parts)


def partwise_mixed(g: GraphBuilder, node: FxNode) -> Any:
    """As :func:`partwise`, for operators that take several tensors of values, real ones among them."""
    dtype = part_dtype(node)
    args = [
        [as_complex(g, b, dtype) for b in a]
        if isinstance(a, list | tuple) and any(isinstance(b, Complex) for b in a)
        else a
        for a in node.args
    ]
    return partwise(g, node.with_args(args))


def values_at(*positions: int) -> Converter:
    """As :func:`partwise`, the arguments at these positions made complex first."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        args = list(node.args)
        for position in positions:
            if not isinstance(args[position], Complex):
                args[position] = as_complex(g, args[position], part_dtype(node))
        return partwise(g, node.with_args(args))

    convert.__name__ = convert.__qualname__ = "partwise_" + "_".join(map(str, positions))
    return convert


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
        if alpha != 1:
            scale = complex_constant(g, alpha, part_dtype(node))
            if reverse:
                x, y = x, c_mul(g, y, scale)
            else:
                y = c_mul(g, y, scale)
        return c_add(g, x, y) if sign > 0 else c_sub(g, x, y)

    convert.__name__ = convert.__qualname__ = "add" if sign > 0 else "sub"
    return convert


def product(op_type: str) -> Converter:
    """matmul, mm, bmm, mv, dot: four products of real matrices."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        return bilinear(g, getattr(g.op, op_type), *both(g, node, 0, 1))

    convert.__name__ = convert.__qualname__ = "matmul"
    return convert


def vdot(g: GraphBuilder, node: FxNode) -> Complex:
    """vdot(Tensor self, Tensor other) -> Tensor"""
    x, y = both(g, node, 0, 1)
    return bilinear(g, g.op.MatMul, c_conj(g, x), y)


def addmm(g: GraphBuilder, node: FxNode) -> Complex:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    bias, a, b = both(g, node, 0, 1, 2)
    beta, alpha = (complex_constant(g, v, part_dtype(node)) for v in node.args[3:5])
    return c_add(g, c_mul(g, bias, beta), c_mul(g, bilinear(g, g.op.MatMul, a, b), alpha))


def add_scaled_product(divide: bool) -> Converter:
    """addcmul, addcdiv."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        x, a, b = both(g, node, 0, 1, 2)
        scale = complex_constant(g, node.args[3], part_dtype(node))
        return c_add(g, x, c_mul(g, scale, c_div(g, a, b) if divide else c_mul(g, a, b)))

    convert.__name__ = convert.__qualname__ = "addcdiv" if divide else "addcmul"
    return convert


def make_complex(g: GraphBuilder, node: FxNode) -> Complex:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    real, imag = (operand(g, a, part_dtype(node)) for a in node.args)
    shape = g.op.Shape(g.op.Add(real, imag)) if tuple(real.shape or ()) != tuple(imag.shape or ()) else None
    return Complex(real, imag) if shape is None else Complex(g.op.Expand(real, shape), g.op.Expand(imag, shape))


def polar(g: GraphBuilder, node: FxNode) -> Complex:
    """polar(Tensor abs, Tensor angle) -> Tensor"""
    size, angle = (operand(g, a, part_dtype(node)) for a in node.args)
    return Complex(g.op.Mul(size, g.op.Cos(angle)), g.op.Mul(size, g.op.Sin(angle)))


def real(g: GraphBuilder, node: FxNode) -> Any:
    """real(Tensor(a) self) -> Tensor(a)"""
    return node.args[0].real


def imag(g: GraphBuilder, node: FxNode) -> Any:
    """imag(Tensor(a) self) -> Tensor(a)"""
    return node.args[0].imag


def view_as_real(g: GraphBuilder, node: FxNode) -> Value:
    """view_as_real(Tensor(a) self) -> Tensor(a)"""
    return to_pairs(g, node.args[0])


def view_as_complex(g: GraphBuilder, node: FxNode) -> Complex:
    """view_as_complex(Tensor(a) self) -> Tensor(a)"""
    return from_pairs(g, node.args[0])


def to(g: GraphBuilder, node: FxNode) -> Any:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor

    A complex number made real loses its imaginary part; made a bool it is true where either part is not zero.
    """  # noqa: E501
    x, dtype = node.args[0], node.dtype
    if dtype in PART_DTYPE:
        return as_complex(g, x, PART_DTYPE[dtype])
    if dtype == ir.DataType.BOOL:
        return nonzero(g, x)
    return convert_dtype(g, x.real, dtype)


def nonzero(g: GraphBuilder, x: Complex) -> Value:
    """Where a complex number isn't 0."""
    result: Value = g.op.Or(g.cast(x.real, ir.DataType.BOOL), g.cast(x.imag, ir.DataType.BOOL))
    return result


def equality(negate: bool) -> Converter:
    """eq, ne: of both parts."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtypes = [a.real.dtype for a in node.args if isinstance(a, Complex)]
        dtype = ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT
        x, y = (as_complex(g, a, dtype) for a in node.args)
        same = g.op.And(g.op.Equal(x.real, y.real), g.op.Equal(x.imag, y.imag))
        return g.op.Not(same) if negate else same

    convert.__name__ = convert.__qualname__ = "ne" if negate else "eq"
    return convert


def test_parts(op_type: str, every: bool = False) -> Converter:
    """isnan, isinf: of either part; isfinite: of both."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = node.args[0]
        if every:
            bad = [g.op.Or(g.op.IsNaN(p), g.op.IsInf(p)) for p in (x.real, x.imag)]
            result: Value = g.op.Not(g.op.Or(*bad))
            return result
        result = g.op.Or(getattr(g.op, op_type)(x.real), getattr(g.op, op_type)(x.imag))
        return result

    convert.__name__ = convert.__qualname__ = "isfinite" if every else op_type.lower()
    return convert


def logical(op_type: str) -> Converter:
    """logical_and, logical_or, logical_xor, logical_not of complex numbers: what isn't 0 is true."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        truths = [nonzero(g, a) if isinstance(a, Complex) else g.cast(a, ir.DataType.BOOL) for a in node.args]
        result: Value = getattr(g.op, op_type)(*truths)
        return result

    convert.__name__ = convert.__qualname__ = f"logical_{op_type.lower()}"
    return convert


def filled(g: GraphBuilder, node: FxNode) -> Complex:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    name = node.op_name.partition(".")[0]
    value: Any = 1 if "ones" in name else 0
    if "full" in name or "fill" in name:
        value = node.args[2 if "new_full" in name else 1]
    dtype = part_dtype(node)
    sizes: list[Any] = [d if isinstance(d, int) else g.symbol(d) for d in node.shape]
    if isinstance(value, Value | Complex):
        pair = as_complex(g, value, dtype)
        return Complex(fill(g, pair.real, sizes, dtype), fill(g, pair.imag, sizes, dtype))
    number = complex(value)
    return Complex(fill(g, number.real, sizes, dtype), fill(g, number.imag, sizes, dtype))


def prod_dim(g: GraphBuilder, node: FxNode) -> Complex:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor

    A static axis, element by element.
    """
    x = as_complex(g, node.args[0], part_dtype(node))
    every = node.op_name.endswith(".default")
    if every:
        x = Complex(g.reshape(x.real, [-1]), g.reshape(x.imag, [-1]))
    rank = rank_of(x.real)
    axis = 0 if every else normalize_axis(node.args[1], rank)
    if not rank:
        return x
    size = g.concrete_shape([g.dim(x.real, axis)], "axis of a complex product")[0]
    total = complex_constant(g, 1.0, part_dtype(node))
    for index in range(size):
        piece = Complex(*(g.op.Gather(p, g.const(index), axis=axis) for p in (x.real, x.imag)))
        total = c_mul(g, total, piece)
    if not size:
        raise Unsupported("a complex product of no elements")
    if not every and node.args[2]:
        total = Complex(unsqueeze(g, total.real, axis), unsqueeze(g, total.imag, axis))
    return total


def of_real(name: str) -> Converter:
    """An operator whose result depends on the shape alone: that of the real part."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        return g.convert(node.part("real"))

    convert.__name__ = convert.__qualname__ = name
    return convert


def nonzero_places(g: GraphBuilder, node: FxNode) -> Value:
    """nonzero(Tensor self) -> Tensor"""
    result: Value = g.convert(node.part("real").with_args([nonzero(g, node.args[0])]))
    return result


def expand_as(g: GraphBuilder, node: FxNode) -> Any:
    """expand_as(Tensor(a) self, Tensor other) -> Tensor(a)"""
    x, other = node.args
    shape = g.shape(other.real if isinstance(other, Complex) else other)
    if not isinstance(x, Complex):
        return g.op.Expand(x, shape)
    return Complex(g.op.Expand(x.real, shape), g.op.Expand(x.imag, shape))


def addbmm(g: GraphBuilder, node: FxNode) -> Complex:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    bias, a, b = both(g, node, 0, 1, 2)
    beta, alpha = (complex_constant(g, v, part_dtype(node)) for v in node.args[3:5])
    product = bilinear(g, g.op.MatMul, a, b)
    total = Complex(*(reduce(g, "ReduceSum", part, [0], False) for part in (product.real, product.imag)))
    return c_add(g, c_mul(g, bias, beta), c_mul(g, total, alpha))


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


def constant_pad(g: GraphBuilder, node: FxNode) -> Complex:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    value = complex(node.args[2])
    parts = []
    for name, number in (("real", value.real), ("imag", value.imag)):
        part = node.part(name)
        parts.append(g.convert(part.with_args([*part.args[:2], number, *part.args[3:]])))
    return Complex(*parts)


def random_normal(g: GraphBuilder, node: FxNode) -> Complex:
    """randn(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor

    Both parts have the variance one half.
    """
    dtype = part_dtype(node)
    shape = filled(g, node).real
    half = g.const(math.sqrt(0.5), dtype)
    return Complex(*(g.op.Mul(g.op.RandomNormalLike(shape, dtype=int(dtype)), half) for _ in range(2)))


def scalar_tensor(g: GraphBuilder, node: FxNode) -> Complex:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return as_complex(g, node.args[0], part_dtype(node))


_PARTWISE = """
view _unsafe_view reshape view_copy flatten unflatten ravel permute permute_copy transpose t mT numpy_T
movedim moveaxis swapaxes swapdims unsqueeze squeeze expand broadcast_to slice select narrow split
split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind flip fliplr flipud roll rot90 clone
contiguous detach alias lift_fresh lift_fresh_copy detach_ positive index index_select gather repeat tile
repeat_interleave tril triu diagonal diag_embed diagonal_copy take take_along_dim sum mean cumsum unfold
as_strided as_strided_copy view_as reshape_as neg negative masked_select nansum trace broadcast_tensors
meshgrid unsafe_split unsafe_chunk unsafe_split_with_sizes narrow_copy expand_copy squeeze_copy
unsqueeze_copy transpose_copy t_copy slice_copy select_copy unbind_copy split_copy unfold_copy resolve_neg
diag real_copy alias_copy resize
""".split()
#: Operators and the positions of their arguments that hold values.
_VALUES: dict[str, tuple[int, ...]] = {
    "where": (1, 2),
    "masked_fill": (0, 2),
    "index_put": (0, 2),
    "_unsafe_index_put": (0, 2),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "index_add": (0, 3),
    "index_copy": (0, 3),
    "index_fill": (0, 3),
    "select_scatter": (0, 1),
    "slice_scatter": (0, 1),
    "diagonal_scatter": (0, 1),
    "as_strided_scatter": (0, 1),
    "masked_scatter": (0, 2),
    "put": (0, 2),
    "copy": (0, 1),
}
_UNARY: dict[str, Any] = {
    "exp": c_exp, "log": c_log, "sqrt": c_sqrt, "sinh": c_sinh, "cosh": c_cosh, "tanh": c_tanh,
    "asin": c_asin, "acos": c_acos, "asinh": c_asinh, "acosh": c_acosh, "atanh": c_atanh,
    "sin": via_i(c_sinh), "cos": via_i(c_cosh, back=False), "tan": via_i(c_tanh), "atan": via_i(c_atanh),
    "reciprocal": c_reciprocal, "sgn": c_sgn, "sigmoid": c_sigmoid, "log2": c_log_base(2.0), "log10": c_log_base(10.0),
    "rsqrt": lambda g, x: c_reciprocal(g, c_sqrt(g, x)), "square": lambda g, x: c_mul(g, x, x),
    "log1p": lambda g, x: c_log(g, Complex(g.op.Add(x.real, g.const(1.0, x.real.dtype)), x.imag)),
    "expm1": lambda g, x: (lambda e: Complex(g.op.Sub(e.real, g.const(1.0, e.real.dtype)), e.imag))(c_exp(g, x)),
    "exp2": lambda g, x: c_exp(g, c_scale(g, x, g.const(math.log(2.0), x.real.dtype))),
    "conj": c_conj, "_conj": c_conj, "conj_physical": c_conj, "_conj_physical": c_conj, "resolve_conj": lambda g, x: x,
    "angle": c_angle, "abs": c_abs, "absolute": c_abs, "sign": c_sgn,
}  # fmt: skip
_FILLED = """
full full_like new_full zeros zeros_like new_zeros zero ones ones_like new_ones fill empty empty_like
new_empty empty_strided new_empty_strided empty_permuted
""".split()
_PRIMS = """
exp log sqrt sinh cosh tanh asin acos asinh acosh atanh sin cos tan atan reciprocal sign rsqrt conj_physical
conj abs log2 log10 log1p expm1 exp2
""".split()
_PRIMS_BINARY: dict[str, Converter] = {
    "add": scaled_sum(1),
    "sub": scaled_sum(-1),
    "mul": binary(c_mul),
    "div": binary(c_div),
    "pow": binary(c_pow),
}


def _rules(name: str, convert: Converter) -> Rule:
    return Rule(f"complex:aten::{name}", convert)


RULES: list[Rule] = [
    *[_rules(name, partwise) for name in _PARTWISE],
    *[_rules(name, values_at(*positions)) for name, positions in _VALUES.items()],
    *[
        _rules(name, partwise_mixed)
        for name in ("cat", "stack", "hstack", "vstack", "dstack", "concat", "column_stack")
    ],
    *[_rules(name, unary(function)) for name, function in _UNARY.items()],
    *[_rules(name, scaled_sum(1)) for name in ("add",)],
    *[_rules(name, scaled_sum(-1)) for name in ("sub", "subtract")],
    _rules("rsub", scaled_sum(-1, reverse=True)),
    *[_rules(name, binary(c_mul)) for name in ("mul", "multiply")],
    *[_rules(name, binary(c_div)) for name in ("div", "divide", "true_divide")],
    _rules("pow", binary(c_pow)),
    *[_rules(name, product("MatMul")) for name in ("matmul", "mm", "bmm", "mv", "dot")],
    _rules("vdot", vdot),
    _rules("addmm", addmm),
    _rules("addcmul", add_scaled_product(divide=False)),
    _rules("addcdiv", add_scaled_product(divide=True)),
    _rules("complex", make_complex),
    _rules("polar", polar),
    _rules("real", real),
    _rules("imag", imag),
    _rules("view_as_real", view_as_real),
    _rules("view_as_complex", view_as_complex),
    *[_rules(name, to) for name in ("to", "_to_copy", "type_as")],
    Rule("complex:prims::convert_element_type", to),
    _rules("eq", equality(negate=False)),
    _rules("ne", equality(negate=True)),
    _rules("isnan", test_parts("IsNaN")),
    _rules("isinf", test_parts("IsInf")),
    _rules("isfinite", test_parts("", every=True)),
    *[_rules(f"logical_{op.lower()}", logical(op)) for op in ("And", "Or", "Xor", "Not")],
    *[_rules(name, filled) for name in _FILLED],
    _rules("prod", prod_dim),
    _rules("nonzero", nonzero_places),
    _rules("expand_as", expand_as),
    _rules("addbmm", addbmm),
    _rules("var", variance(root=False, with_mean=False)),
    _rules("std", variance(root=True, with_mean=False)),
    _rules("var_mean", variance(root=False, with_mean=True)),
    _rules("std_mean", variance(root=True, with_mean=True)),
    _rules("constant_pad_nd", constant_pad),
    *[_rules(name, random_normal) for name in ("randn", "randn_like")],
    _rules("scalar_tensor", scalar_tensor),
    *[_rules(name, of_real(name)) for name in ("sym_size", "sym_numel", "_shape_as_tensor", "_assert_tensor_metadata")],
    *[Rule(f"complex:prims::{name}", unary(_UNARY[name])) for name in _PRIMS],
    *[Rule(f"complex:prims::{name}", convert) for name, convert in _PRIMS_BINARY.items()],
    *[Rule(f"complex:prims::{name}", convert) for name, convert in (("real", real), ("imag", imag))],
]
