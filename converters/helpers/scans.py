"""ONNX Scan along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.runtimes import EMPTY_SCANS_END_THE_PROCESS

Step = Callable[[list[Value], Value], tuple[list[Value], list[Value]]]


def scan(g: GraphBuilder, x: Value, axis: int, starts: list[Any], step: Step) -> list[Value]:
    """Walks along one axis.

    Args:
        g: The builder.
        x: The tensor.
        axis: Non-negative axis.
        starts: The start of each state: a number and its dtype; it gets the shape of ``x`` without the axis.
        step: From the states and one slice of ``x`` to the next states and the slices of the outputs.

    Returns:
        The outputs, stacked along the axis.
    """
    may_be_empty = not all(isinstance(g.dim(x, a), int) for a in range(rank_of(x)))
    if not may_be_empty or not EMPTY_SCANS_END_THE_PROCESS.concerns(g):
        return _scanned(g, x, axis, starts, step)
    outputs: list[Value] = []

    def with_elements() -> list[Value]:
        outputs.extend(_scanned(g, x, axis, starts, step))
        return outputs

    other = g.subgraph(with_elements, name="elements")
    empty = g.subgraph(lambda: [g.cast(x, y.dtype) for y in outputs if y.dtype is not None], name="empty")
    is_without = g.op.Equal(g.op.Size(x), g.const(0))
    results = g.op.If(is_without, then_branch=empty, else_branch=other, _outputs=len(outputs))
    results = [results] if isinstance(results, Value) else list(results)
    for result, output in zip(results, outputs, strict=True):
        result.type, result.shape = output.type, output.shape
    return results


def _scanned(g: GraphBuilder, x: Value, axis: int, starts: list[Any], step: Step) -> list[Value]:
    sizes = [g.dim(x, a) for a in range(rank_of(x)) if a != axis]
    dims = [d for a, d in enumerate(x.shape or ()) if a != axis]
    shape = g.vector(sizes)
    states = [g.op.Expand(g.const(value, dtype), shape) for value, dtype in starts]
    assert x.dtype is not None
    count: list[int] = []

    def body(*values: Value) -> list[Value]:
        following, outputs = step(list(values[:-1]), values[-1])
        count.append(len(outputs))
        return [*following, *outputs]

    graph = g.subgraph(body, [*((dtype, dims) for _, dtype in starts), (x.dtype, dims)], name="scan")
    results = g.op.Scan(
        *states,
        x,
        body=graph,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_output_axes=[axis] * count[0],
        _outputs=len(states) + count[0],
    )
    outputs: list[Value] = list(results[len(states) :])
    for output in outputs:
        output.shape = ir.Shape(list(x.shape or ()))
    return outputs


def is_empty(x: Value) -> bool:
    """Whether a tensor is known to be empty. ONNX Runtime's Scan fails over an axis of size 0."""
    return x.shape is not None and 0 in list(x.shape)


def running_product(g: GraphBuilder, x: Value, axis: int) -> Value:
    """The product of all elements up to each element."""

    def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
        product = g.op.Mul(states[0], item)
        return [product], [g.op.Identity(product)]

    return scan(g, x, axis, [(1, x.dtype)], step)[0]
