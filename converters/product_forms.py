"""Products by a weight in the form that ONNX Runtime's CPU computes fastest.

Measured on ONNX Runtime 1.31, one thread, [2, 64, 256] to 768 and [2, 197, 192] to 576 columns, median of a hundred runs:
one product whose columns are split afterwards costs 3 to 8 % more than one product for each part, for Split copies what
the smaller products write in place.

The rules of this family come before the rules of operators that reshape a product or take a part of it. They decline if
the operand is no such product, or has other readers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import int_attribute, made_by, same_sizes
from onnxplug.converters.helpers.dtypes import FLOAT
from onnxplug.converters.helpers.rows import is_taken_apart, rows_with_bias
from onnxplug.errors import Decline
from onnxplug.interpret.node import FxNode, schema_parameters
from onnxplug.registry.names import packet_of, qualified_name
from onnxplug.registry.rule import Rule

#: More products than this cost more time than they save, and so do narrower products.
_MOST_PARTS, _NARROWEST = 4, 32


# -- rows --------------------------------------------------------------------------------------------------------------


def _taken_apart_of_gemm(node: FxNode) -> bool:
    return isinstance(node.args[0], ir.Value) and made_by(node.args[0], "Gemm") is not None and is_taken_apart(node.fx)


def product_of_rows(g: GraphBuilder, node: FxNode) -> ir.Value:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)

    ``Reshape(Gemm(Reshape(x), w, b))`` that only flattens the leading axes of ``x``: ``MatMul(x, w) + b``. The last axes of
    ``x`` may be flattened too, as the operands of heads are.
    """
    gemm = made_by(node.args[0], "Gemm")
    assert gemm is not None
    if not _optimized(g, node) or not _read_only_by(g, node, [node.args[0]]) or int_attribute(gemm, "transA", 0):
        raise Decline("the product is read by others too")
    if any(name in gemm.attributes and gemm.attributes[name].as_float() != 1 for name in ("alpha", "beta")):
        raise Decline("the product is scaled")
    flat = made_by(gemm.inputs[0], "Reshape")
    weight, bias = gemm.inputs[1], gemm.inputs[2] if len(gemm.inputs) > 2 else None
    source = flat.inputs[0] if flat is not None else None
    transposed = bool(int_attribute(gemm, "transB", 0))
    if source is None or weight is None or weight.shape is None or not g.is_weight(weight):
        raise Decline("it is not a product of flattened rows and a weight")
    if transposed and not g.weights.is_read_once(weight):
        raise Decline("the weight is read by others too")
    width, columns = weight.shape[::-1] if transposed else weight.shape
    dims, result, rows = dims_of(source), node.shape, dims_of(gemm.inputs[0])
    if dims is None or rows is None or len(result) < 3 or rows[-1] != width or not width:
        raise Decline("the axes of the rows are not known")
    leading, inner = dims[: len(result) - 1], dims[len(result) - 1 :]
    if _static_product(inner) != width or not same_sizes(result, [*leading, columns]):
        raise Decline("the rows are laid out anew")
    if bias is not None and dims_of(bias) not in ((columns,), (1,)):
        raise Decline("the bias is not one of the columns")
    if transposed:
        weight = g.weights.permuted(weight, (1, 0))
    if len(inner) > 1:
        source = g.op.Reshape(source, g.const([0] * len(leading) + [width]))
    product = g.op.MatMul(source, weight)
    return product if bias is None else g.op.Add(product, bias)


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """A product and how its columns are laid out where they are taken apart.

    Attributes:
        x, weight, bias: ``MatMul(x, weight) + bias``.
        steps: The product, the sum, and the results of a Reshape and a Transpose, as far as there are such nodes.
        leading: The number of axes before the columns.
        sizes: The axes that the Reshape makes of the columns; a single axis without a Reshape.
        perm: The order of the Transpose.
    """

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    steps: Sequence[ir.Value]
    leading: int
    sizes: tuple[int, ...]
    perm: tuple[int, ...] | None


@dataclass(frozen=True)
class _Taken:
    """The part that a node reads of a tensor.

    Attributes:
        axis: The axis along which it takes.
        bounds: First and last index of each part.
        drops: Whether the axis goes.
    """

    axis: int
    bounds: Sequence[tuple[int, int]]
    drops: bool


def _of_product(node: FxNode) -> bool:
    """Whether a node reads a product by a value that no node makes, directly or through an Add, a Reshape and a Transpose."""
    x = node.args[0]
    return isinstance(x, ir.Value) and _steps(x) is not None


def _steps(end: ir.Value) -> list[ir.Value] | None:
    """The values on the way from a value back to its product."""
    steps = [end]
    for op_type in ("Transpose", "Reshape", "Add"):
        producer = made_by(steps[-1], op_type)
        if producer is None:
            continue
        sources = [v for v in producer.inputs if v is not None]
        if op_type == "Add":
            sources = [v for v in sources if made_by(v, "MatMul") is not None]
        if not sources:
            return None
        steps.append(sources[0])
    product = made_by(steps[-1], "MatMul")
    weight = product.inputs[1] if product is not None else None
    return steps if weight is not None and weight.producer() is None else None


def parts_of_product(g: GraphBuilder, node: FxNode) -> list[ir.Value]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]

    And all operators that give several parts of a product (queries, keys and values): a product for each part.
    """
    if not _optimized(g, node):
        raise Decline("the plain form is requested")
    layout = _layout(node.args[0])
    if layout is None or not g.is_weight(layout.weight) or not g.weights.is_read_once(layout.weight):
        raise Decline("it is not a product by a weight that nothing else reads")
    columns = math.prod(layout.sizes)
    if layout.bias is not None and (not g.is_weight(layout.bias) or dims_of(layout.bias) != (columns,)):
        raise Decline("the sum is not one with a bias of the columns")
    readers = _readers(node.fx.args[0])
    if readers is None or not _read_only_by(g, node, layout.steps, among_readers=True):
        raise Decline("the product is read whole too")
    axis = readers[node.fx].axis
    inner = (layout.perm[axis] if layout.perm is not None else axis) - layout.leading
    if inner < 0 or any(taken.axis != axis for taken in readers.values()):
        raise Decline("it is not the columns that are taken apart")
    if not _worthwhile(layout.sizes, inner, [bounds for taken in readers.values() for bounds in taken.bounds]):
        raise Decline("the parts overlap, are many, or narrow")
    taken = readers[node.fx]
    return [_one(g, layout, inner, start, end, taken.drops) for start, end in taken.bounds]


def part_of_product(g: GraphBuilder, node: FxNode) -> ir.Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)

    And all operators that give a part of a product, if other nodes read the other parts.
    """
    (part,) = parts_of_product(g, node)
    return part


def _layout(end: ir.Value) -> _Layout | None:
    steps = _steps(end)
    if steps is None:
        return None
    product, perm, bias, shaped = steps[-1], None, None, end
    transpose, matmul = made_by(end, "Transpose"), made_by(product, "MatMul")
    assert matmul is not None
    if transpose is not None:
        if "perm" not in transpose.attributes:
            return None
        perm, shaped = tuple(transpose.attributes["perm"].as_ints()), steps[1]
    reshape = made_by(shaped, "Reshape")
    if reshape is not None and int_attribute(reshape, "allowzero", 0):
        return None
    add = made_by(steps[-2], "Add") if len(steps) > 1 else None
    if add is not None:
        bias = add.inputs[add.inputs[0] is product]
    x, weight = matmul.inputs
    columns, before, after = dims_of(weight), dims_of(product), dims_of(shaped)
    if x is None or weight is None or columns is None or len(columns) != 2 or before is None or after is None:
        return None
    leading = len(before) - 1
    sizes = tuple(d for d in after[leading:] if isinstance(d, int))
    if not same_sizes(after[:leading], before[:-1]) or _static_product(after[leading:]) != columns[1]:
        return None
    return _Layout(x, weight, bias, steps, leading, sizes, perm)


def _readers(source: Any) -> dict[torch.fx.Node, _Taken] | None:
    """The part that each reader of an FX node reads; ``None`` where a reader reads more than parts along an axis."""
    parts: dict[torch.fx.Node, _Taken] = {}
    for reader in source.users:
        if isinstance(reader.meta.get("val"), int | torch.SymInt):
            continue  # of its shape
        taken = _taken(reader, source)
        if taken is None:
            return None
        parts[reader] = taken
    return parts


def _taken(fx: torch.fx.Node, source: torch.fx.Node) -> _Taken | None:
    """The part that a node reads of its first argument; ``None`` for any other operator, and for sizes known only at run time."""
    kind = _KINDS.get(packet_of(qualified_name(fx.target)))
    if kind is None or not fx.args or fx.args[0] is not source or len(fx.all_input_nodes) != 1:
        return None
    arguments = {p.name: p.default for p in schema_parameters(fx.target)}
    arguments.update(zip(arguments, fx.args, strict=False))
    arguments.update(fx.kwargs)
    shape = source.meta["val"].shape
    axis = arguments["dim"] % len(shape)
    whole = shape[axis]
    if type(whole) is not int:
        return None
    bounds = kind(arguments, whole, axis, fx.meta["val"])
    return None if bounds is None else _Taken(axis, bounds, kind in (_each, _at))


_Bounds = Sequence[tuple[int, int]] | None


def _each(arguments: dict[str, Any], whole: int, axis: int, results: Any) -> _Bounds:
    return [(i, i + 1) for i in range(whole)]


def _at(arguments: dict[str, Any], whole: int, axis: int, results: Any) -> _Bounds:
    index = arguments["index"] % whole
    return [(index, index + 1)]


def _pieces(arguments: dict[str, Any], whole: int, axis: int, results: Any) -> _Bounds:
    sizes = [piece.shape[axis] for piece in results]
    return list(pairwise(accumulate(sizes, initial=0))) if all(type(size) is int for size in sizes) else None


def _between(arguments: dict[str, Any], whole: int, axis: int, results: Any) -> _Bounds:
    start, end, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(whole)
    return [(start, end)] if step == 1 else None


def _from(arguments: dict[str, Any], whole: int, axis: int, results: Any) -> _Bounds:
    start = arguments["start"] % whole if arguments["start"] else 0
    return [(start, start + arguments["length"])]


_Kind = Callable[[dict[str, Any], int, int, Any], _Bounds]
_SEVERAL: dict[str, _Kind] = {
    "aten::unbind": _each,
    **dict.fromkeys(("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split"), _pieces),
    **dict.fromkeys(("aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"), _pieces),
}
_SINGLE: dict[str, _Kind] = {"aten::select": _at, "aten::slice": _between, "aten::narrow": _from}
_KINDS = {**_SEVERAL, **_SINGLE}


def _worthwhile(sizes: Sequence[int], axis: int, parts: Sequence[tuple[int, int]]) -> bool:
    size = sizes[axis]
    others = math.prod(sizes) // size if size else 0
    widths = [end - start for start, end in parts]
    if not 2 <= len(parts) <= _MOST_PARTS or min(widths) * others < _NARROWEST:
        return False
    # No product is computed twice.
    return sum(widths) <= size and len({start for start, _ in parts}) == len(parts)


def _one(g: GraphBuilder, layout: _Layout, axis: int, start: int, end: int, drops: bool) -> ir.Value:
    """The product for one part, in the layout of the part."""
    sizes = list(layout.sizes)
    key = ("columns", layout.sizes, axis, start, end)
    take = _columns(layout.sizes, axis, start, end)
    form = f"columns{start * math.prod(sizes[axis + 1 :])}"
    weight = g.derive(layout.weight, take, key, form=form)
    sizes[axis : axis + 1] = [] if drops else [end - start]
    bias = g.derive(layout.bias, take, key, form=form) if layout.bias is not None else None
    if bias is not None and weight.dtype == FLOAT:
        result = rows_with_bias(g, layout.x, weight, bias, transposed=False, sizes=sizes)
    else:
        result = g.op.MatMul(layout.x, weight)
        if bias is not None:
            result = g.op.Add(result, bias)
        if len(sizes) != 1:
            result = g.op.Reshape(result, g.const([0] * layout.leading + sizes))
    perm = layout.perm
    if perm is not None and drops:
        gone = axis + layout.leading
        perm = tuple(p - (p > gone) for p in perm if p != gone)
    return result if perm is None else g.op.Transpose(result, perm=list(perm))


def _columns(sizes: Sequence[int], axis: int, start: int, end: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Takes the columns that lie there on the axis, of a tensor whose last axis they are."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if not axis:  # they lie side by side
            width = math.prod(sizes[1:])
            return tensor.narrow(-1, start * width, (end - start) * width)
        leading = tensor.shape[:-1]
        split = tensor.reshape(*leading, *sizes)
        return split.narrow(len(leading) + axis, start, end - start).reshape(*leading, -1)

    return take


# -- common helpers ----------------------------------------------------------------------------------------------------


def _optimized(g: GraphBuilder, node: FxNode) -> bool:
    return g.optimize and not node.derived


def _static_product(sizes: Iterable[Any]) -> int | None:
    """The product of sizes; ``None`` when one is dynamic."""
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(list(sizes)) else None


def _read_only_by(g: GraphBuilder, node: FxNode, steps: Sequence[ir.Value], among_readers: bool = False) -> bool:
    """Whether nothing but a call reads the values that lead to its first argument.

    Args:
        g: The builder.
        node: The call.
        steps: The values.
        among_readers: Leave the readers of the argument itself out: they are looked at apart.
    """
    ids = {id(value) for value in steps}
    current: Any = node.fx.args[0]
    if not among_readers and len(current.users) != 1:
        return False
    while True:
        above = [fx for fx in current.all_input_nodes if id(g.interpreter.value_of(fx)) in ids]
        if not above:
            # The other readers of a branch's input are unknown here.
            return bool(current.op == "call_function")
        current = above[0]
        if len(current.users) != 1:
            return False


_SLOWER_SPLIT = "products of some columns each cost less than one product and a Split of it"

RULES: list[Rule] = [
    *[
        Rule(
            f"aten::{name}", product_of_rows, target="onnxruntime:cpu", when=_taken_apart_of_gemm, reason=_SLOWER_SPLIT
        )
        for name in ("view.default", "_unsafe_view.default", "reshape.default", "unflatten.int")
    ],
    *[
        Rule(f"aten::{name}", parts_of_product, target="onnxruntime:cpu", when=_of_product, reason=_SLOWER_SPLIT)
        for name in (
            "unbind.int",
            "split.Tensor",
            "unsafe_split.Tensor",
            "split.sizes",
            "split_with_sizes.default",
            "unsafe_split_with_sizes.default",
            "chunk.default",
            "unsafe_chunk.default",
            "tensor_split.sections",
            "tensor_split.indices",
        )
    ],
    *[
        Rule(f"aten::{name}", part_of_product, target="onnxruntime:cpu", when=_of_product, reason=_SLOWER_SPLIT)
        for name in ("select.int", "slice.Tensor", "narrow.default")
    ],
]
