"""Tensors filled with one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import as_array
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.promotion import operand
from onnxplug.interpret.node import FxNode


def filled(g: GraphBuilder, value: Any, sizes: Sequence[Any], dtype: ir.DataType) -> Value:
    """A tensor of these sizes (ints and Values) full of one value: a constant when small and static."""
    if isinstance(value, Value):
        scalar = operand(g, value, dtype)
        if rank_of(scalar):
            scalar = g.reshape(scalar, [])
        return g.op.Expand(scalar, g.vector(sizes)) if len(sizes) else scalar
    if all(isinstance(s, int) for s in sizes) and int(np.prod(sizes, dtype=np.float64)) <= 16:
        return g.const(np.full(tuple(sizes), as_array(value, dtype)), dtype)
    fill = ir.tensor(as_array(value, dtype).reshape(1))
    result = g.op.ConstantOfShape(g.vector(sizes), value=fill)
    return result


def sizes_of(node: FxNode, position: int) -> list[Any]:
    """A size argument, its static sizes as ints."""
    sizes = node.args[position]
    return [d if isinstance(d, int) else s for d, s in zip(node.shape, sizes, strict=True)]
