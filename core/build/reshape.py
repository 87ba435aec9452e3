"""Reshape to static and dynamic sizes by as few nodes as the sizes allow.

For ``x`` of shape ``[batch, seq, 64]``: the target ``[batch, seq, 4, 16]`` is the constant ``[0, 0, 4, 16]``, as 0 copies the size
of ``x`` at the same axis, and ``[batch, 64*seq]`` is ``[0, -1]``, as one size may be inferred. Only additional dynamic sizes are
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.build.opset import Emitter
from onnxplug.build.sizes import Sizes
from onnxplug.errors import Unsupported


def reshape(g: Emitter, table: Sizes, x: ir.Value, sizes: Sequence[Any]) -> ir.Value:
    """``x`` with another shape (:meth:`GraphBuilder.reshape`).

    Args:
        g: The builder.
        table: Its sizes.
        x: The value.
        sizes: The new shape: ints, scalars of sizes, or dimensions.

    Raises:
        Unsupported: A size is 0 below opset 14, or no value in the graph holds a dynamic size.
    """
    result = _reshaped(g, table, x, sizes)
    producer = result.producer()
    is_reshape = producer is not None and producer.op_type == "Reshape"
    if is_reshape and -1 not in [size for size in sizes if isinstance(size, int)]:
        result.shape = table.shape_of(tuple(map(table.dim_of, sizes)))
    return result


def _reshaped(g: Emitter, table: Sizes, x: ir.Value, sizes: Sequence[Any]) -> ir.Value:
    source: Sequence[Any] = x.shape.dims if x.shape is not None else ()
    zeros = [axis for axis, size in enumerate(sizes) if isinstance(size, int) and size == 0]
    if zeros and g.opset >= 14:  # nothing is copied or inferred when a size is 0
        return g.op.Reshape(x, g.vector(sizes), allowzero=1)
    if zeros:
        if not all(axis < len(source) and source[axis] == 0 for axis in zeros):
            raise Unsupported("a reshape to a size of 0 needs opset 14 or later")
        return g.op.Reshape(x, g.vector(sizes))
    target = [0 if _is_copied(table, size, source[axis : axis + 1]) else size for axis, size in enumerate(sizes)]
    unknown = [axis for axis, size in enumerate(target) if not isinstance(size, int)]
    if unknown and -1 not in [size for size in target if isinstance(size, int)]:
        # Of several sizes, prefer a size that no value holds yet.
        new = [a for a in unknown if type(sizes[a]) is ir.SymbolicDim and table.find(sizes[a]) is None]
        inferred = (new or unknown)[0] if len(unknown) == 1 or new else None
        # Nothing is inferred (-1) when another size is 0, and a computed size of 0 would copy one. ONNX Runtime's ReshapeFusion
        # would bring the -1 back, but for allowzero=1.
        others = [size for axis, size in enumerate(sizes) if axis != inferred]
        if g.opset >= 14 and any(map(table.may_be_empty, others)) and _are_known(table, sizes):
            return g.op.Reshape(x, g.vector(sizes), allowzero=1)
        if inferred is not None:
            target[inferred] = -1
    return g.op.Reshape(x, g.vector(target))


def _is_copied(table: Sizes, size: Any, dims: Sequence[Any]) -> bool:
    """Whether a dynamic size is the size of the operand's axis at the same place; ``dims`` has that size, or is empty."""
    if isinstance(size, int) or not dims or isinstance(dims[0], int) or dims[0].value is None:
        return False
    return bool(table.name_of(size) == dims[0].value)


def _are_known(table: Sizes, sizes: Sequence[Any]) -> bool:
    try:
        return all(table.require(size) is not None for size in sizes if type(size) is ir.SymbolicDim)
    except Unsupported:
        return False
