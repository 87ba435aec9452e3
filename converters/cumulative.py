"""Cumulative products, extrema and logsumexp: one ONNX Scan along the axis, whatever its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters._axes import normalize_axis, rank_of
from onnxplug.converters.comparison import comparable
from onnxplug.converters.exponential import log1p_of, wide
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_INT64 = ir.DataType.INT64

Step = Callable[[list[Value], Value], tuple[list[Value], list[Value]]]


def scan(g: GraphBuilder, x: Value, axis: int, starts: list[Any], step: Step) -> list[Value]:
    """Walks along one axis.

    Args:
        g: The builder.
        x: The tensor.
        axis: Non-negative axis.
        starts: What each state starts from: a number and its dtype; it takes the shape of ``x`` without the axis.
        step: From the states and one slice of ``x`` to the next states and the slices of the outputs.

    Returns:
        The outputs, stacked along the axis.
    """
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
    """Whether a tensor is known to hold nothing. ONNX Runtime's Scan fails over an axis of size 0."""
    return x.shape is not None and 0 in list(x.shape)


def cumprod(g: GraphBuilder, node: FxNode) -> Value:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    x, axis = node.args[:2]
    inner = comparable(node.dtype, False)
    x = g.cast(x, inner)
    if not rank_of(x) or is_empty(x):
        return g.cast(x, node.dtype)

    def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
        product = g.op.Mul(states[0], item)
        return [product], [g.op.Identity(product)]

    return g.cast(scan(g, x, normalize_axis(axis, rank_of(x)), [(1, inner)], step)[0], node.dtype)


def cumulative_extremum(largest: bool) -> Converter:
    """cummax, cummin: NaN stays from where it occurs; of equal elements the last one's index."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, axis = node.args
        dtype = node.dtype
        inner = comparable(dtype, False)
        if not rank_of(x):
            return [x, g.const(0)]
        if is_empty(x):
            return [x, g.cast(x, _INT64)]
        floating = inner.is_floating_point()
        edge: Any = float("-inf") if floating else -(1 << (inner.bitwidth - 1))
        if not largest:
            edge = float("inf") if floating else (1 << (inner.bitwidth - 1)) - 1

        def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
            best, place, number = states
            taken = (g.op.GreaterOrEqual if largest else g.op.LessOrEqual)(item, best)
            if floating:
                taken = g.op.Or(g.op.IsNaN(item), g.op.And(taken, g.op.Not(g.op.IsNaN(best))))
            best = g.op.Where(taken, item, best)
            place = g.op.Where(taken, number, place)
            following = g.op.Add(number, g.const(1))
            return [best, place, following], [g.op.Identity(best), g.op.Identity(place)]

        starts = [(edge, inner), (0, _INT64), (0, _INT64)]
        values, places = scan(g, g.cast(x, inner), normalize_axis(axis, rank_of(x)), starts, step)
        return [g.cast(values, dtype), places]

    convert.__name__ = convert.__qualname__ = "cummax" if largest else "cummin"
    return convert


def logcumsumexp(g: GraphBuilder, node: FxNode) -> Value:
    """logcumsumexp(Tensor self, int dim) -> Tensor

    Each step max + log1p(exp(-|a - b|)); equal infinities give themselves.
    """
    x, axis = node.args
    dtype = wide(node.dtype)
    if not dtype.is_floating_point():
        raise Unsupported("logcumsumexp of integers: torch itself refuses it")
    x = g.cast(x, dtype)
    if not rank_of(x) or is_empty(x):
        return g.cast(x, node.dtype)

    def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
        total = states[0]
        top = g.op.Max(total, item)
        gap = g.op.Neg(g.op.Abs(g.op.Sub(total, item)))
        added = g.op.Add(top, log1p_of(g, g.op.Exp(gap)))
        same = g.op.And(g.op.IsInf(total), g.op.Equal(total, item))
        following = g.op.Where(same, item, added)
        return [following], [g.op.Identity(following)]

    start = [(float("-inf"), dtype)]
    return g.cast(scan(g, x, normalize_axis(axis, rank_of(x)), start, step)[0], node.dtype)


RULES: list[Rule] = [
    Rule("aten::cumprod.default", cumprod),
    Rule("aten::cummax.default", cumulative_extremum(largest=True)),
    Rule("aten::cummin.default", cumulative_extremum(largest=False)),
    Rule("aten::logcumsumexp.default", logcumsumexp),
]
