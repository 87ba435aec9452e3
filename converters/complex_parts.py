"""Complex tensors: operators that treat the real and the imaginary part alike, and operators that join or separate them."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import PART_DTYPE, Complex, from_pairs, to_pairs
from onnxplug.converters.helpers.casts import convert_dtype
from onnxplug.converters.helpers.complex_pairs import as_complex, c_times, nonzero, part_dtype
from onnxplug.converters.helpers.dtypes import BOOL
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.errors import Decline, Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def partwise(g: GraphBuilder, node: FxNode) -> Any:
    """Applies an operator that only moves elements to the real and to the imaginary parts."""
    real, imag = node.part("real"), node.part("imag")
    if not g.interpreter.has_rule(real):
        # An operator without a rule for real tensors is decomposed first.
        raise Decline("no rule for real tensors")
    parts = [g.convert(part) for part in (real, imag)]
    if isinstance(parts[0], list | tuple):
        # Of several tensors some may be real.
        is_complex = [spec is not None and spec.dtype in PART_DTYPE for spec in node.outputs]
        return [Complex(a, b) if both else a for a, b, both in zip(*parts, is_complex, strict=True)]
    return Complex(*parts)


def partwise_mixed(g: GraphBuilder, node: FxNode) -> Any:
    """As :func:`partwise`, for operators that take several tensors of values, of which some may be real."""
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


def copy(g: GraphBuilder, node: FxNode) -> Any:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor

    Complex numbers that a real tensor takes lose their imaginary part.
    """
    if node.dtype in PART_DTYPE:
        return values_at(0, 1)(g, node)
    return g.convert(node.part("real"))


def scatter_reduced(g: GraphBuilder, node: FxNode) -> Any:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    if node.args[4] == "multiply":
        raise Unsupported("scatter of complex numbers with reduce='multiply'")
    return values_at(0, 3)(g, node)


def index_add(g: GraphBuilder, node: FxNode) -> Any:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    x, axis, index, source, alpha = node.args
    x, source = (as_complex(g, v, part_dtype(node)) for v in (x, source))
    return partwise(g, node.with_args([x, axis, index, c_times(g, source, alpha), 1]))


def view_dtype(g: GraphBuilder, node: FxNode) -> Any:
    """view.dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)

    Complex numbers ``[*, n]`` as the real numbers ``[*, 2 n]`` of their parts, and back.
    """
    x, dtype = node.args[0], node.dtype
    if x.dtype == dtype:
        return x
    if isinstance(x, Complex) and x.real.dtype == dtype:
        *sizes, last = g.dims(x.real)
        return g.reshape(to_pairs(g, x), [*sizes, 2 * last if isinstance(last, int) else g.op.Mul(last, g.const(2))])
    if PART_DTYPE.get(dtype) == x.dtype:
        *sizes, last = g.dims(x)
        half = last // 2 if isinstance(last, int) else g.op.Div(last, g.const(2))
        return from_pairs(g, g.reshape(x, [*sizes, half, 2]))
    raise Unsupported("a tensor's bits seen as another dtype")


def of_real(name: str) -> Converter:
    """An operator whose result depends on the shape alone: that of the real part."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        return g.convert(node.part("real"))

    convert.__name__ = convert.__qualname__ = name
    return convert


def nonzero_places(g: GraphBuilder, node: FxNode) -> Value:
    """nonzero(Tensor self) -> Tensor"""
    return g.convert(node.part("real").with_args([nonzero(g, node.args[0])]))


def expand_as(g: GraphBuilder, node: FxNode) -> Any:
    """expand_as(Tensor(a) self, Tensor other) -> Tensor(a)"""
    x, other = node.args
    shape = g.shape(other.real if isinstance(other, Complex) else other)
    if not isinstance(x, Complex):
        return g.op.Expand(x, shape)
    return Complex(g.op.Expand(x.real, shape), g.op.Expand(x.imag, shape))


def constant_pad(g: GraphBuilder, node: FxNode) -> Complex:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    value = complex(node.args[2])
    padded = []
    for name, number in (("real", value.real), ("imag", value.imag)):
        part = node.part(name)
        padded.append(g.convert(part.with_args([*part.args[:2], number, *part.args[3:]])))
    return Complex(*padded)


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
    if dtype == BOOL:
        return nonzero(g, x)
    return convert_dtype(g, x.real, dtype)


_PARTWISE = """
view _unsafe_view reshape view_copy flatten unflatten ravel permute permute_copy transpose t mT numpy_T
movedim moveaxis swapaxes swapdims unsqueeze squeeze expand broadcast_to slice select narrow split
split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind flip fliplr flipud roll rot90 clone
contiguous detach alias lift_fresh lift_fresh_copy detach_ positive index index_select gather repeat tile
repeat_interleave tril triu diagonal diag_embed diagonal_copy take take_along_dim unfold
as_strided as_strided_copy view_as reshape_as neg negative masked_select nansum trace broadcast_tensors
meshgrid unsafe_split unsafe_chunk unsafe_split_with_sizes narrow_copy expand_copy squeeze_copy
unsqueeze_copy transpose_copy t_copy slice_copy select_copy unbind_copy split_copy unfold_copy resolve_neg
diag real_copy alias_copy resize
""".split()
#: Operators and the positions of their arguments that hold values.
_VALUES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("sum", "mean", "cumsum"), (0,)),
    "where": (1, 2),
    "masked_fill": (0, 2),
    "index_put": (0, 2),
    "_unsafe_index_put": (0, 2),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "index_copy": (0, 3),
    "index_fill": (0, 3),
    "select_scatter": (0, 1),
    "slice_scatter": (0, 1),
    "diagonal_scatter": (0, 1),
    "as_strided_scatter": (0, 1),
    "masked_scatter": (0, 2),
    "put": (0, 2),
}
RULES: list[Rule] = [
    *[complex_rule(name, partwise) for name in _PARTWISE],
    *[complex_rule(name, values_at(*positions)) for name, positions in _VALUES.items()],
    *[
        complex_rule(name, partwise_mixed)
        for name in ("cat", "stack", "hstack", "vstack", "dstack", "concat", "column_stack")
    ],
    complex_rule("copy", copy),
    complex_rule("index_add", index_add),
    *[complex_rule(f"scatter.{overload}", scatter_reduced) for overload in ("reduce", "value_reduce")],
    complex_rule("view.dtype", view_dtype),
    complex_rule("complex", make_complex),
    complex_rule("polar", polar),
    complex_rule("real", real),
    complex_rule("imag", imag),
    complex_rule("view_as_real", view_as_real),
    complex_rule("view_as_complex", view_as_complex),
    *[complex_rule(name, to) for name in ("to", "_to_copy", "type_as")],
    Rule("complex:prims::convert_element_type", to),
    complex_rule("nonzero", nonzero_places),
    complex_rule("expand_as", expand_as),
    complex_rule("constant_pad_nd", constant_pad),
    *[
        complex_rule(name, of_real(name))
        for name in ("sym_size", "sym_numel", "_shape_as_tensor", "_assert_tensor_metadata")
    ],
    *[Rule(f"complex:prims::{name}", convert) for name, convert in (("real", real), ("imag", imag))],
]
