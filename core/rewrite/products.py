"""Products of matrices in the form that ONNX Runtime's CPU computes fastest.

Measured on ONNX Runtime 1.31, one thread, [2, 64, 256] to 768 and [2, 197, 192] to 576 columns, median of a hundred runs:
one product whose columns are split afterwards costs 3 to 8 % more than one product for each part, for Split copies what
the smaller products write in place; a Gemm with a bias between two Reshapes costs 3 % more than MatMul and Add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug.build.inference.dims import dims_of
from onnxplug.rewrite.matching import int_attribute, is_op, made_by, only_reader, reads, same_sizes, used_once
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

_CPU = (None, "onnxruntime", "onnxruntime:cpu")
#: More products than this cost more than they save, and so do narrower ones.
_MOST_PARTS, _NARROWEST = 4, 32


def product_of_rows(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Reshape(Gemm(Reshape(x), w, b))`` that only flattens the leading axes of ``x``: ``MatMul(x, w) + b``.

    The last axes of ``x`` may be flattened too, as those of heads are.
    """
    gemm = made_by(node.inputs[0], "Gemm")
    if gemm is None or not used_once(node.inputs[0]) or int_attribute(gemm, "transA", 0):
        return None
    if any(name in gemm.attributes and gemm.attributes[name].as_float() != 1 for name in ("alpha", "beta")):
        return None
    flat = made_by(gemm.inputs[0], "Reshape")
    weight, bias = gemm.inputs[1], gemm.inputs[2] if len(gemm.inputs) > 2 else None
    source = flat.inputs[0] if flat is not None else None
    if source is None or weight is None or not g.is_weight(weight) or weight.shape is None:
        return None
    transposed = bool(int_attribute(gemm, "transB", 0))
    width, columns = weight.shape[::-1] if transposed else weight.shape
    dims, result, rows = dims_of(source), dims_of(node.outputs[0]), dims_of(gemm.inputs[0])
    if dims is None or result is None or rows is None or len(result) < 3 or rows[-1] != width or not width:
        return None
    leading, inner = dims[: len(result) - 1], dims[len(result) - 1 :]
    known = [size for size in inner if isinstance(size, int)]
    if len(known) != len(inner) or math.prod(known) != width:
        return None
    if not same_sizes(result, [*leading, columns]) or (transposed and not used_once(weight)):
        return None
    if bias is not None and dims_of(bias) not in ((columns,), (1,)):
        return None
    if transposed:
        weight = g.derive(weight, lambda t: t.permute(1, 0), ("permuted", (1, 0)), form="transposed")
    if len(inner) > 1:
        source = g.op.Reshape(source, g.const([0] * len(leading) + [width]))
    product = g.op.MatMul(source, weight)
    return product if bias is None else g.op.Add(product, bias)


@dataclass(frozen=True)
class _Part:
    """Some columns of a product, as a node takes them.

    Attributes:
        value: What the node makes of them.
        start, end: Where on the axis they lie.
        drops: Whether the node takes the axis away.
    """

    value: ir.Value
    start: int
    end: int
    drops: bool


@dataclass(frozen=True)
class _Layout:
    """How a product's columns are laid out where they are taken apart.

    Attributes:
        product: The value whose last axis the columns are.
        sizes: The axes that a Reshape makes of the columns; one if there is no Reshape.
        perm: The order of a Transpose after it.
        end: The value that is taken apart.
    """

    product: ir.Value
    sizes: tuple[int, ...]
    perm: tuple[int, ...] | None
    end: ir.Value

    @property
    def leading(self) -> int:
        """The number of axes before the columns."""
        return len(self.product.shape or ()) - 1


def product_by_parts(g: GraphBuilder, node: ir.Node) -> dict[ir.Value, ir.Value] | None:
    """``MatMul(x, w) + b`` whose columns are taken apart (queries, keys and values): one product for each part.

    Between the product and what takes it apart may stand a Reshape of the columns and a Transpose.
    """
    weight = node.inputs[1]
    if g.runtime not in _CPU or weight is None or not g.is_weight(weight) or not used_once(weight):
        return None
    sizes = dims_of(weight)
    if sizes is None or len(sizes) != 2:
        return None
    bias, last = None, node.outputs[0]
    add = only_reader(last, "Add")
    if add is not None:
        bias, last = add.inputs[add.inputs[0] is last], add.outputs[0]
        if not g.is_weight(bias) or dims_of(bias) != sizes[1:]:
            return None
    layout = _layout(last)
    axis_and_parts = _parts(g, layout.end) if layout is not None else None
    if layout is None or axis_and_parts is None:
        return None
    axis, parts = axis_and_parts
    axis = (layout.perm[axis] if layout.perm is not None else axis) - layout.leading
    if axis < 0 or not _worthwhile(layout, axis, parts):
        return None
    return {part.value: _one(g, node.inputs[0], weight, bias, layout, axis, part) for part in parts}


def _may_be_taken_apart(node: ir.Node) -> bool:
    """Whether a node multiplies by what no node makes, and the product leads to nodes that may take parts of it."""
    weight = node.inputs[1]
    if weight is None or weight.producer() is not None or not used_once(weight):
        return False
    reader: ir.Node | None = node
    while reader is not None and (reader is node or is_op(reader, "Add", "Reshape", "Transpose")):
        reader = next((use.node for use in reader.outputs[0].uses()), None)
    return is_op(reader, "Split", "Gather", "Slice")


def _layout(product: ir.Value) -> _Layout | None:
    shape = dims_of(product)
    if shape is None or not isinstance(shape[-1], int):
        return None
    sizes: tuple[int, ...] = (shape[-1],)
    perm, end = None, product
    reshape = only_reader(end, "Reshape")
    if reshape is not None:
        dims, leading = dims_of(reshape.outputs[0]), len(shape) - 1
        if dims is None or not same_sizes(dims[:leading], shape[:-1]) or int_attribute(reshape, "allowzero", 0):
            return None
        inner = tuple(d for d in dims[leading:] if isinstance(d, int))
        if len(inner) != len(dims) - leading or math.prod(inner) != shape[-1]:
            return None
        sizes, end = inner, reshape.outputs[0]
    transpose = only_reader(end, "Transpose")
    if transpose is not None and "perm" in transpose.attributes:
        perm, end = tuple(transpose.attributes["perm"].as_ints()), transpose.outputs[0]
    return _Layout(product, sizes, perm, end)


def _parts(g: GraphBuilder, value: ir.Value) -> tuple[int, list[_Part]] | None:
    """The axis along which all readers of a value take parts of it, and the parts."""
    made, rank = value.producer(), len(value.shape or ())
    if value.is_graph_output() or made is None:
        return None
    axes, parts = set(), []
    for reader in dict.fromkeys(value.consumers()):
        found = _taken(g, reader, value) if reader.graph is made.graph and reader.inputs[0] is value else None
        if found is None or len([i for i in reader.inputs if i is value]) != 1:
            return None
        axes.add(found[0] % rank)
        parts += found[1]
    return (axes.pop(), parts) if len(axes) == 1 else None


def _taken(g: GraphBuilder, node: ir.Node, value: ir.Value) -> tuple[int, list[_Part]] | None:
    """The axis and the parts that one node takes of a value."""
    shape = value.shape
    assert shape is not None
    if is_op(node, "Split"):
        axis = int_attribute(node, "axis", 0)
        shapes = [dims_of(out) for out in node.outputs]
        sizes = [size for dims in shapes if dims is not None and isinstance(size := dims[axis], int)]
        if len(sizes) != len(shapes):
            return None
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return axis, [_Part(v, e - s, e, False) for v, s, e in zip(node.outputs, sizes, ends, strict=True)]
    if is_op(node, "Gather"):
        axis, index = int_attribute(node, "axis", 0), g.constant(node.inputs[1])
        whole = shape[axis]
        if index is None or index.ndim or not isinstance(whole, int):
            return None
        start = int(index) % whole
        return axis, [_Part(node.outputs[0], start, start + 1, True)]
    if is_op(node, "Slice") and len(node.inputs) > 3:
        known = [g.constant(v) for v in node.inputs[1:]]
        if any(v is None or v.size != 1 for v in known) or (len(known) > 3 and known[3] != [1]):
            return None
        start, end, axis = (int(v[0]) for v in known[:3] if v is not None)
        length = shape[axis]
        if not isinstance(length, int):
            return None
        start, end, _ = slice(start, end).indices(length)
        return axis, [_Part(node.outputs[0], start, end, False)]
    return None


def _worthwhile(layout: _Layout, axis: int, parts: Sequence[_Part]) -> bool:
    size = layout.sizes[axis]
    others = math.prod(layout.sizes) // size if size else 0
    widths = [part.end - part.start for part in parts]
    if not 2 <= len(parts) <= _MOST_PARTS or min(widths) * others < _NARROWEST:
        return False
    # Nothing is computed twice.
    return sum(widths) <= size and len({part.start for part in parts}) == len(parts)


def _one(
    g: GraphBuilder, x: Any, weight: ir.Value, bias: ir.Value | None, layout: _Layout, axis: int, part: _Part
) -> ir.Value:
    """The product for one part, laid out as the part was."""
    key = ("columns", layout.sizes, axis, part.start, part.end)
    take = _columns(layout.sizes, axis, part.start, part.end)
    form = f"columns{part.start * math.prod(layout.sizes[axis + 1 :])}"
    result = g.op.MatMul(x, g.derive(weight, take, key, form=form))
    if bias is not None:
        result = g.op.Add(result, g.derive(bias, take, key, form=form))
    sizes = list(layout.sizes)
    sizes[axis : axis + 1] = [] if part.drops else [part.end - part.start]
    if len(sizes) != 1:
        result = g.op.Reshape(result, g.const([0] * layout.leading + sizes))
    perm = layout.perm
    if perm is not None and part.drops:
        gone = axis + layout.leading
        perm = tuple(p - (p > gone) for p in perm if p != gone)
    return result if perm is None else g.op.Transpose(result, perm=list(perm))


def _columns(sizes: Sequence[int], axis: int, start: int, end: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Takes the columns that lie there on the axis, of a tensor whose last axis they are."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        leading = tensor.shape[:-1]
        split = tensor.reshape(*leading, *sizes)
        return split.narrow(len(leading) + axis, start, end - start).reshape(*leading, -1)

    return take


REWRITES = [
    Rewrite(
        "product_of_rows",
        "Reshape",
        product_of_rows,
        target="onnxruntime",
        when=reads("Gemm"),
        reason="MatMul and Add cost less than a Gemm between two Reshapes",
    ),
    Rewrite(
        "product_by_parts",
        "MatMul",
        product_by_parts,
        target="onnxruntime",
        when=_may_be_taken_apart,
        reason="products of some columns each cost less than one product and a Split of it",
    ),
]
