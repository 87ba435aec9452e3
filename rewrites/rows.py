"""Rows that are added to a tensor, as a layer of a graph network adds messages: a form for ONNX Runtime's CPU.

Its ``ScatterND`` adds a row at once, 10 to 20 times as fast as ``ScatterElements``, but many rows in several threads and without a
lock. So this form gives it few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import made_by, reads, same_size
from onnxplug.registry.target import closeness
from onnxplug.rewrite.rewrite import Rewrite

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

_TARGET = "onnxruntime:cpu"
#: Elements that one ScatterND adds. ONNX Runtime's pool of threads counts a cycle for each, and leaves less than 210,000 cycles to
#: one thread (seen in 1.24 to 1.32); tests/rewrite/test_rows.py looks whether it does.
MOST_ELEMENTS = 2**17
#: Elements of a tensor to which rows are added, up to which copying it for each ScatterND is cheaper than ScatterElements.
_MOST_COPIED = 2**24
_ADDED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64)
#: How the names of graphs begin whose ScatterND has few rows.
_FEW = "few_rows"


def are_few(g: GraphBuilder, node: ir.Node) -> bool:
    """Whether a ``ScatterND`` adds so few elements that ONNX Runtime's CPU adds them in one thread."""
    if closeness((_TARGET,), g.runtime) is None:
        return False
    if node.graph is not None and (node.graph.name or "").startswith(_FEW):
        return True
    sizes = [size for size in dims_of(node.inputs[2]) or (None,) if isinstance(size, int)]
    return len(sizes) == len(dims_of(node.inputs[2]) or (None,)) and math.prod(sizes) <= MOST_ELEMENTS


def rows_by_few(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``ScatterElements`` that adds whole rows is a ``ScatterND``; where they are many, a Loop of such nodes."""
    x, _, rows = node.inputs
    places = _places(node)
    if x is None or places is None or rows is None:
        return None
    dtype = x.dtype
    if dtype is None or dtype not in _ADDED:
        return None
    sizes, shape = dims_of(x) or (), dims_of(rows) or ()
    widths = [size for size in shape[1:] if isinstance(size, int)]
    if list(sizes[1:]) != widths or len(widths) != len(shape) - 1 or math.prod(widths) < 2:
        return None
    most = max(1, MOST_ELEMENTS // math.prod(widths))
    column = g.op.Unsqueeze(places, g.const([1]))
    axis, step = g.const([0]), g.const([most])

    def at_once() -> ir.Value:
        return g.op.ScatterND(x, column, rows, reduction="add")

    def in_turn() -> ir.Value:
        # Another type than the node's own index, which would be shared, and computed in every case.
        narrow = g.op.Cast(g.op.Unsqueeze(places, g.const(list(range(1, len(shape))))), to=ir.DataType.INT32)
        return g.op.ScatterElements(x, g.op.Expand(narrow, g.op.Shape(rows)), rows, axis=0, reduction="add")

    def few(number: ir.Value, condition: ir.Value, total: ir.Value) -> list[ir.Value]:
        start = g.op.Mul(number, step)
        some = [g.op.Slice(value, start, g.op.Add(start, step), axis) for value in (column, rows)]
        return [condition, g.op.ScatterND(total, *some, reduction="add")]

    def by_few() -> ir.Value:
        body = g.subgraph(few, [(ir.DataType.INT64, ()), (ir.DataType.BOOL, ()), (dtype, sizes)], name=_FEW)
        times = g.op.Div(g.op.Add(g.op.Shape(rows, start=0, end=1), g.const([most - 1])), step)
        looped: ir.Value = g.op.Loop(g.op.Squeeze(times, axis), None, x, body=body)
        return looped

    def many() -> ir.Value:
        fixed = [size for size in sizes if isinstance(size, int)]
        small = math.prod(fixed) <= _MOST_COPIED if len(fixed) == len(sizes) else None
        return _chosen(g, small, lambda: g.op.LessOrEqual(g.op.Size(x), g.const(_MOST_COPIED)), by_few, in_turn)

    all_few = shape[0] <= most if isinstance(shape[0], int) else None
    return _chosen(g, all_few, lambda: g.op.LessOrEqual(g.op.Shape(rows, start=0, end=1), step), at_once, many)


def _chosen(
    g: GraphBuilder,
    known: bool | None,
    condition: Callable[[], ir.Value],
    yes: Callable[[], ir.Value],
    no: Callable[[], ir.Value],
) -> ir.Value:
    """One of two forms; by an If where the export doesn't know which."""
    if known is not None:
        return yes() if known else no()
    branches = [g.subgraph(build, name=name) for build, name in ((yes, _FEW), (no, "many_rows"))]
    result: ir.Value = g.op.If(condition(), then_branch=branches[0], else_branch=branches[1])
    return result


def _places(node: ir.Node) -> ir.Value | None:
    """The place of each row, [N], where a ``ScatterElements`` adds rows along the first axis."""
    _, index, rows = node.inputs
    reduction, axis = node.attributes.get("reduction"), node.attributes.get("axis")
    expand = made_by(index, "Expand")
    column = made_by(expand.inputs[0], "Unsqueeze", "Reshape") if expand is not None else None
    places = column.inputs[0] if column is not None else None
    if reduction is None or reduction.as_string() != "add" or (axis is not None and axis.as_int()) or column is None:
        return None
    size, first, shape = dims_of(places), dims_of(column.outputs[0]), dims_of(rows)
    if places is None or places.dtype != ir.DataType.INT64 or not size or not first or not shape or len(size) != 1:
        return None
    of_rows = (
        same_size(size[0], first[0]) and same_size(size[0], shape[0]) and list(first[1:]) == [1] * (len(shape) - 1)
    )
    return places if of_rows else None


REWRITES = [
    Rewrite(
        "rows_by_few",
        "ScatterElements",
        rows_by_few,
        opset=(16, None),
        target=_TARGET,
        when=reads("Expand"),
        reason="ONNX Runtime's ScatterND adds rows faster than its ScatterElements, and loses none where it is given few",
    ),
]
