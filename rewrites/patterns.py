"""The builtin rewrites. Each rewrite alone, and all together, are tested against the plain form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import made_by, reads, reads_stored, used_once
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder


def gemm_from_matmul_add(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Add(MatMul(a, b), c)`` with matrices and a bias that broadcasts to the product: ``Gemm(a, b, c)``."""
    for product, bias in (node.inputs, node.inputs[::-1]):
        producer = made_by(product, "MatMul")
        if producer is None or bias is None or not used_once(product):
            continue
        a, b = producer.inputs
        if a is None or b is None or a.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16):
            continue
        shapes = (dims_of(a), dims_of(b), dims_of(bias))
        if any(s is None for s in shapes):
            continue
        left, right, added = shapes
        assert left is not None and right is not None and added is not None
        if len(left) != 2 or len(right) != 2 or len(added) != 1 or added[0] not in (1, right[1]) or right[1] is None:
            continue
        result: ir.Value = g.op.Gemm(a, b, bias)
        return result
    return None


def transposed_weight(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A weight that is only ever read transposed is stored transposed, as ``NAME.transposed``; a tied weight stays."""
    weight = node.inputs[0]
    if weight is None or not g.is_weight(weight) or len(weight.uses()) != 1 or node.outputs[0].is_graph_output():
        return None
    rank = len(weight.shape or ())
    perm = tuple(node.attributes["perm"].as_ints() if "perm" in node.attributes else range(rank)[::-1])
    return g.weights.permuted(weight, perm)


def _product_of_rank_2(node: ir.Node) -> bool:
    shape = node.outputs[0].shape
    return (shape is None or len(shape) == 2) and _reads_product(node)


_reads_product = reads("MatMul")


def where_of_not(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Where(Not(c), a, b)`` is ``Where(c, b, a)``."""
    producer = made_by(node.inputs[0], "Not")
    if producer is None or not used_once(node.inputs[0]):
        return None
    result: ir.Value = g.op.Where(producer.inputs[0], node.inputs[2], node.inputs[1])
    return result


def slice_of_slice(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """Two slices of different axes, one after the other, in one node."""
    inner = made_by(node.inputs[0], "Slice")
    if inner is None or not used_once(node.inputs[0]):
        return None
    parts = [(n.inputs[1], n.inputs[2], n.inputs[3] if len(n.inputs) > 3 else None) for n in (inner, node)]
    steps = [n.inputs[4] if len(n.inputs) > 4 else None for n in (inner, node)]
    axes = [g.constant(p[2]) for p in parts]
    source = inner.inputs[0]
    if source is None or source.shape is None or any(a is None for a in axes):
        return None
    rank = len(source.shape)
    sets = [{int(a) % rank for a in axis} for axis in axes if axis is not None]
    ones = [s is None or ((c := g.constant(s)) is not None and bool((c == 1).all())) for s in steps]
    if sets[0] & sets[1] or not all(ones):
        return None
    starts, ends, joined = (g.op.Concat(parts[0][i], parts[1][i], axis=0) for i in range(3))
    if any(g.constant(v) is None for v in (starts, ends)):
        return None  # joining sizes known only at run time costs as much as it saves
    result: ir.Value = g.op.Slice(source, starts, ends, joined)
    return result


def transpose_of_ones(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``Transpose`` that moves axes of size 1 alone leaves the elements where they are: a ``Reshape``."""
    x, dims = node.inputs[0], dims_of(node.inputs[0])
    if x is None or dims is None or "perm" not in node.attributes:
        return None
    perm = node.attributes["perm"].as_ints()
    kept = [axis for axis in perm if dims[axis] != 1]
    if kept != sorted(kept):
        return None
    dynamic = [axis for axis in kept if not isinstance(dims[axis], int)]
    if all(perm[axis] == axis for axis in dynamic):
        # 0 copies the size of the same axis.
        shape = [0 if axis in dynamic else dims[axis] for axis in perm]
    elif len(dynamic) == 1 and 0 not in dims:
        shape = [-1 if axis in dynamic else dims[axis] for axis in perm]
    else:
        ones = [axis for axis in perm if dims[axis] == 1]
        bare = g.op.Squeeze(x, g.const(sorted(ones)))
        return g.op.Unsqueeze(bare, g.const([at for at, axis in enumerate(perm) if axis in ones]))
    return g.op.Reshape(x, g.const(shape))


def _has_ones(node: ir.Node) -> bool:
    x = node.inputs[0]
    return x is not None and x.producer() is not None and x.shape is not None and 1 in x.shape.dims


REWRITES = [
    Rewrite("transposed_weight", "Transpose", transposed_weight, when=reads_stored),
    Rewrite("transpose_of_ones", "Transpose", transpose_of_ones, when=_has_ones),
    Rewrite("gemm_from_matmul_add", "Add", gemm_from_matmul_add, when=_product_of_rank_2),
    Rewrite("where_of_not", "Where", where_of_not, when=reads("Not")),
    Rewrite("slice_of_slice", "Slice", slice_of_slice, when=reads("Slice")),
]
