"""Sizes, and the grids of indices made from them; batch shapes of stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.axes import unsqueeze


def smaller(g: GraphBuilder, m: Size, n: Size) -> Size:
    """The lesser of two sizes."""
    if isinstance(m, int) and isinstance(n, int):
        return min(m, n)
    return g.op.Min(g.as_scalar(m), g.as_scalar(n))


def offset(g: GraphBuilder, size: Size, by: Size) -> Size:
    """The sum of two sizes."""
    if isinstance(size, int) and isinstance(by, int):
        return size + by
    return g.op.Add(g.as_scalar(size), g.as_scalar(by))


def iota(g: GraphBuilder, size: Size) -> Value:
    """The indices 0 … size - 1."""
    return g.op.Range(g.const(0), g.as_scalar(size), g.const(1))


def on_diagonal(g: GraphBuilder, m: Size, n: Size) -> Value:
    """A mask ``[m, n]`` of the diagonal."""
    return g.op.Equal(unsqueeze(g, iota(g, m), 1), unsqueeze(g, iota(g, n), 0))


def eye(g: GraphBuilder, m: Size, n: Size, dtype: ir.DataType) -> Value:
    """Ones on the diagonal of ``[m, n]``."""
    return g.cast(on_diagonal(g, m, n), dtype)


def full(g: GraphBuilder, value: float | Value, dtype: ir.DataType, sizes: Sequence[Size]) -> Value:
    """A tensor of these sizes with one value, or with a tensor broadcast to them."""
    if any(isinstance(size, int) and size == 0 for size in sizes):
        # ONNX Runtime removes an Expand from size 1 to size 0 as an identity, which it is not.
        value = 0.0
    number = value if isinstance(value, Value) else g.const(value, dtype)
    return g.op.Expand(number, g.vector(list(sizes)))


def batch_of(g: GraphBuilder, x: Value) -> list[Size]:
    """The sizes before the last two."""
    return g.dims(x)[:-2]


def common_batch(g: GraphBuilder, a: Value, b: Value) -> list[Size]:
    """The batch sizes to which two stacks of matrices broadcast."""
    first, second = batch_of(g, a), batch_of(g, b)
    rank = max(len(first), len(second))
    left: list[Size] = [*([1] * (rank - len(first))), *first]
    right: list[Size] = [*([1] * (rank - len(second))), *second]
    return [_common_size(g, m, n) for m, n in zip(left, right, strict=True)]


def _common_size(g: GraphBuilder, m: Size, n: Size) -> Size:
    if m is n or (isinstance(n, int) and n == 1):
        return m
    if isinstance(m, int):
        return n if m == 1 else m
    if isinstance(n, int):
        return n
    # Where two sizes differ, one is 1, and the other may be 0.
    return g.op.Where(g.op.Equal(m, g.const(1)), n, m)


def same_batch(g: GraphBuilder, a: Value, b: Value) -> bool:
    """Whether two stacks of matrices are known to have the same batch shape."""
    first, second = batch_of(g, a), batch_of(g, b)
    return len(first) == len(second) and all(
        m is n or (isinstance(m, int) and isinstance(n, int) and m == n) for m, n in zip(first, second, strict=True)
    )
