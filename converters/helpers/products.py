"""Matrix products of every dtype, and by weights that are restored from integers."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, swap, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, FLOAT16
from onnxplug.converters.helpers.reductions import in_rows, is_long, reduce
from onnxplug.converters.helpers.runtimes import ACTIVATIONS_ARE_ROUNDED, computed_in

GEMM_DTYPES = frozenset({FLOAT, DOUBLE, FLOAT16})


def product(g: GraphBuilder, a: Value, b: Value) -> Value:
    """MatMul; ONNX multiplies no integers of 8 and 16 bits, and ONNX Runtime loses digits in sums of millions of products."""
    dtype = a.dtype
    assert dtype is not None
    if rank_of(a) and rank_of(b) and is_long(g, a, [rank_of(a) - 1]):
        return _long_product(g, a, b)
    inner = computed_in(g, "MatMul", dtype)
    if inner == dtype:
        restored = _by_restored_weight(g, a, b) if ACTIVATIONS_ARE_ROUNDED.concerns(g) else None
        return g.op.MatMul(a, b) if restored is None else restored
    return g.cast(g.op.MatMul(g.cast(a, inner), g.cast(b, inner)), dtype)


def _long_product(g: GraphBuilder, a: Value, b: Value) -> Value:
    """A product along a long axis: the sum of the products of rows of that axis; in double where the axis is dynamic."""
    size = g.dim(a, -1)
    if not isinstance(size, int):
        return g.cast(g.op.MatMul(g.cast(a, DOUBLE), g.cast(b, DOUBLE)), FLOAT)
    if rank_of(a) == rank_of(b) == 1:
        return reduce(g, "ReduceSum", g.op.Mul(a, b), [0], False)
    left, right = (unsqueeze(g, x, i) if rank_of(x) == 1 else x for i, x in enumerate((a, b)))
    parts = in_rows(g, left, rank_of(left) - 1, size)
    rows, count, columns = (n if isinstance(n, int) else 1 for n in (*g.dims(parts)[-3:-1], g.dim(right, -1)))
    if rows * count * columns > (rows + columns) * size:  # the products would take more memory than the operands
        return g.op.MatMul(a, b)
    products = g.op.MatMul(swap(g, parts, -3, -2), in_rows(g, right, rank_of(right) - 2, size))
    total = reduce(g, "ReduceSum", products, [rank_of(products) - 3], False)
    gone = [-2] * (left is not a) + [-1] * (right is not b)
    return squeeze(g, total, *(axis + rank_of(total) for axis in gone))


_MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})
_QUANTIZES = frozenset({"QuantizeLinear", "Clip", "Cast", "Identity"})


def _behind(x: Value, operators: frozenset[str]) -> Value:
    """The input of the chain of such nodes that ends in a value."""
    producer = x.producer()
    while (
        producer is not None
        and producer.op_type in operators
        and not producer.domain
        and producer.inputs[0] is not None
    ):
        x = producer.inputs[0]
        producer = x.producer()
    return x


def is_restored(x: Value) -> bool:
    producer = x.producer()
    return producer is not None and producer.op_type == "DequantizeLinear" and not producer.domain


def _by_restored_weight(g: GraphBuilder, a: Value, b: Value) -> Value | None:
    """The product with a weight that DequantizeLinear restores, where ``a`` isn't quantised; ``None`` for any other.

    It is a Gemm of [out, in], or has the weight first: ONNX Runtime fuses a MatMul by it into a product that rounds ``a`` to
    bytes.
    """
    weight = _behind(b, frozenset({"Transpose"}))
    producer = weight.producer()
    known = rank_of(a) > 0 and rank_of(b) == 2 and b.shape is not None and a.dtype in GEMM_DTYPES
    if producer is None or not is_restored(weight) or not known or is_restored(_behind(a, _MOVES)):
        return None
    source = producer.inputs[0]
    if source is None or g.stored(_behind(source, _QUANTIZES)) is None:
        return None
    width, columns = g.dim(b, 0), g.dim(b, 1)
    if not isinstance(width, int) or not isinstance(columns, int) or not width:
        return None
    rows = a if rank_of(a) == 2 else g.reshape(a, [-1, width])
    transposed = b is not weight and b.producer().inputs[0] is weight  # type: ignore[union-attr]
    if transposed:
        result = g.op.Gemm(rows, weight, transB=1)
    else:
        sides = (g.op.Transpose(v, perm=[1, 0]) for v in (b, rows))
        result = g.op.Transpose(g.op.MatMul(*sides), perm=[1, 0])
    return result if rank_of(a) == 2 else g.reshape(result, [*g.dims(a)[:-1], columns])
