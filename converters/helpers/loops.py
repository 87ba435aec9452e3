"""Loops over the rows or columns of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.sizes import Size
from onnxplug.converters.helpers.dtypes import BOOL, INT64
from onnxplug.converters.helpers.matrices import dtype_of


def repeat(
    g: GraphBuilder,
    count: Size,
    step: Callable[..., Sequence[Value]],
    *states: Value,
    until: bool = False,
) -> list[Value]:
    """The states after ``count`` steps ``step(j, *states)``, by a Loop.

    With ``until`` a step returns, before the states, whether to go on. The states keep their dtypes and shapes.
    """
    if isinstance(count, int) and count <= 0:
        return list(states)
    if isinstance(count, int) and count == 1 and not until:
        return list(step(g.const(0), *states))

    def body(j: Value, condition: Value, *inner: Value) -> list[Value]:
        results = list(step(j, *inner))
        return results if until else [condition, *results]

    inputs: list[tuple[ir.DataType, Any]] = [(INT64, ()), (BOOL, ())]
    inputs += [(dtype_of(s), s.shape.dims if s.shape is not None else None) for s in states]
    graph = g.subgraph(body, inputs)
    looped = g.op.Loop(g.as_scalar(count), g.const(True), *states, body=graph, _outputs=len(states))
    results = [looped] if len(states) == 1 else list(looped)
    for result, state in zip(results, states, strict=True):
        result.type = state.type
        result.shape = state.shape
    return results


def as_index(g: GraphBuilder, j: Value) -> Value:
    """A loop's counter with shape [1], which keeps the axis that it indexes."""
    return g.as_vector(j)
