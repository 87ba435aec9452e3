"""Cumulative products, extrema and logsumexp: one ONNX Scan along the axis, whatever its size."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import normalize_axis, rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, INT64
from onnxplug.converters.helpers.elementary import log1p_of
from onnxplug.converters.helpers.exactness import SKIPS_NAN, of_floats
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import in_rows
from onnxplug.converters.helpers.runtimes import LONG_SUMS_LOSE_DIGITS, computed_in
from onnxplug.converters.helpers.scans import is_empty, running_product, scan
from onnxplug.converters.helpers.scattering import neutral
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

#: The longest axis along which logarithms of sums are added up one after another.
_ROW = 1 << 10


def cumprod(g: GraphBuilder, node: FxNode) -> Value:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    x, axis = node.args[:2]
    inner = computed_in(g, "Mul", wide(node.dtype))
    x = g.cast(x, inner)
    if not rank_of(x) or is_empty(x):
        return g.cast(x, node.dtype)

    return g.cast(running_product(g, x, normalize_axis(axis, rank_of(x))), node.dtype)


def cumulative_extremum(largest: bool, exact: bool = False) -> Converter:
    """cummax, cummin: equal elements give the index of the last; with ``exact`` NaN propagates from where it occurs."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, axis = node.args
        dtype = node.dtype
        inner = computed_in(g, "GreaterOrEqual LessOrEqual Where", dtype)
        if not rank_of(x):
            return [x, g.const(0)]
        if is_empty(x):
            return [x, g.cast(x, INT64)]
        floating = inner.is_floating_point()
        edge: Any = neutral("amax" if largest else "amin", inner)

        def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
            best, place, number = states
            taken = (g.op.GreaterOrEqual if largest else g.op.LessOrEqual)(item, best)
            if exact and floating:
                taken = g.op.Or(g.op.IsNaN(item), g.op.And(taken, g.op.Not(g.op.IsNaN(best))))
            best = g.op.Where(taken, item, best)
            place = g.op.Where(taken, number, place)
            following = g.op.Add(number, g.const(1))
            return [best, place, following], [g.op.Identity(best), g.op.Identity(place)]

        starts = [(edge, inner), (0, INT64), (0, INT64)]
        values, places = scan(g, g.cast(x, inner), normalize_axis(axis, rank_of(x)), starts, step)
        return [g.cast(values, dtype), places]

    convert.__name__ = convert.__qualname__ = f"cum{'max' if largest else 'min'}{'_exact' if exact else ''}"
    return convert


def logcumsumexp(g: GraphBuilder, node: FxNode) -> Value:
    """logcumsumexp(Tensor self, int dim) -> Tensor

    Computed in double, as by torch, where a runtime has it and the axis is not known to be short. A long axis is taken in rows.
    """
    x, axis = node.args
    dtype = wide(node.dtype)
    if not dtype.is_floating_point():
        raise Unsupported("logcumsumexp of integers: torch itself refuses it")
    if not rank_of(x) or is_empty(x):
        return x
    axis = normalize_axis(axis, rank_of(x))
    size = g.dim(x, axis)
    short = isinstance(size, int) and size <= _ROW
    x = g.cast(x, dtype if short or not LONG_SUMS_LOSE_DIGITS.concerns(g) else DOUBLE)
    if short or not isinstance(size, int):
        return g.cast(_running_logsumexp(g, x, axis), node.dtype)
    sums = _running_logsumexp(g, in_rows(g, x, axis, size), axis + 1)
    rows = _running_logsumexp(g, g.op.Gather(sums, g.const(-1), axis=axis + 1), axis)
    rows = g.op.Slice(rows, g.const([0]), g.const([-1]), g.const([axis]))
    edge = [0] * (2 * rank_of(x))
    edge[axis] = 1
    before = unsqueeze(g, g.op.Pad(rows, g.vector(edge), g.const(float("-inf"), x.dtype)), axis + 1)
    sizes = g.dims(x)
    sums = g.reshape(_log_of_two(g, before, sums), [*sizes[:axis], -1, *sizes[axis + 1 :]])
    return g.cast(g.op.Slice(sums, g.const([0]), g.const([size]), g.const([axis])), node.dtype)


def _running_logsumexp(g: GraphBuilder, x: Value, axis: int) -> Value:
    def step(states: list[Value], item: Value) -> tuple[list[Value], list[Value]]:
        following = _log_of_two(g, states[0], item)
        return [following], [g.op.Identity(following)]

    return scan(g, x, axis, [(float("-inf"), x.dtype)], step)[0]


def _log_of_two(g: GraphBuilder, a: Value, b: Value) -> Value:
    """The logarithm of the sum of two exponentials: max + log1p(exp(-|a - b|)).

    The difference of two equal infinities is NaN, and the result that infinity.
    """
    difference = g.op.Where(g.op.Equal(a, b), g.const(0.0, a.dtype), g.op.Sub(a, b))
    return g.op.Add(g.op.Max(a, b), log1p_of(g, g.op.Exp(g.op.Neg(g.op.Abs(difference)))))


RULES: list[Rule] = [
    Rule("aten::cumprod.default", cumprod),
    Rule("aten::cummax.default", cumulative_extremum(largest=True)),
    Rule("aten::cummin.default", cumulative_extremum(largest=False)),
    Rule("aten::logcumsumexp.default", logcumsumexp),
    Rule("aten::cummax.default", cumulative_extremum(largest=True, exact=True), when=of_floats, **SKIPS_NAN),
    Rule("aten::cummin.default", cumulative_extremum(largest=False, exact=True), when=of_floats, **SKIPS_NAN),
]
