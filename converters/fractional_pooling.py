"""Fractional max pooling: windows at pseudo-random places, gathered by index."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.converters.helpers.exactness import SKIPS_NAN
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.tables import of_rank
from onnxplug.converters.helpers.windows import largest_along, planes, spread
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def fractional_max_pool_exact(g: GraphBuilder, node: FxNode, spatial: int) -> list[Value]:
    """fractional_max_pool2d(Tensor self, int[2] kernel_size, int[2] output_size, Tensor random_samples) -> (Tensor, Tensor)

    A window with NaN gives the first NaN.
    """
    return fractional_max_pool(g, node, spatial, exact=True)


def fractional_max_pool(g: GraphBuilder, node: FxNode, spatial: int, exact: bool = False) -> list[Value]:
    """fractional_max_pool2d(Tensor self, int[2] kernel_size, int[2] output_size, Tensor random_samples) -> (Tensor, Tensor)

    Graham (2014): with alpha = (n - k) / (o - 1) window i starts at floor((i + u) alpha) - floor(u alpha), the last window at
    n - k; u is the random sample of the axis, one for each image and channel.
    """
    x, kernel, out, samples = node.args
    single = rank_of(x) == spatial + 1
    x = unsqueeze(g, x, 0) if single else x
    x = g.cast(x, computed_in(g, "ArgMax", node.dtype))
    if rank_of(samples) == 2:
        samples = unsqueeze(g, samples, 0)
    kernel, out = spread(kernel, spatial), spread(out, spatial)
    sizes = [g.dim(x, 2 + axis) for axis in range(spatial)]
    places: Value | None = None
    for axis, (size, k, o) in enumerate(zip(sizes, kernel, out, strict=True)):
        # torch computes the places in the dtype of the samples.
        dtype = samples.dtype
        # torch's two kernels differ: the samples of planes are (width, height), those of volumes (depth, height, width).
        u = g.op.Gather(samples, g.const(1 - axis if spatial == 2 else axis), axis=2)
        starts = _starts(g, u, size, k, o, dtype)
        window = g.op.Add(unsqueeze(g, starts, 3), g.const(np.arange(k, dtype=np.int64)))
        axes = [2 + a for a in range(2 * spatial) if a not in (axis, spatial + axis)]
        window = unsqueeze(g, window, *axes)
        width = size if isinstance(size, Value) else g.const(size)
        places = window if places is None else g.op.Add(g.op.Mul(places, width), window)
    assert places is not None
    batch = [g.dim(x, 0), g.dim(x, 1)]
    index = g.reshape(places, [*batch, math.prod(out) * math.prod(kernel)])
    gathered = g.op.GatherElements(planes(g, x), index, axis=2)
    shape = [*batch, math.prod(out), math.prod(kernel)]
    values, chosen = largest_along(g, g.reshape(gathered, shape), 3, exact)
    picked = g.op.GatherElements(g.reshape(index, shape), chosen, axis=3)
    results = [g.reshape(squeeze(g, v, 3), [*batch, *out]) for v in (g.cast(values, node.dtype), picked)]
    return [squeeze(g, v, 0) if single else v for v in results]


def _starts(g: GraphBuilder, u: Value, size: int | Value, k: int, o: int, dtype: ir.DataType) -> Value:
    """Where the windows of one axis start, [batch, channels, o] of the samples [batch, channels]."""
    u = unsqueeze(g, u, 2)
    end = g.op.Sub(size, g.const(k)) if isinstance(size, Value) else g.const(size - k)
    room = g.cast(end, dtype)
    if o == 1:
        return g.cast(g.op.Add(g.op.Mul(u, g.const(0.0, dtype)), room), INT64)
    alpha = g.op.Div(room, g.const(float(o - 1), dtype))
    steps = g.const(np.arange(o).astype(np.float64), dtype)
    places = g.op.Sub(g.cast(g.op.Mul(g.op.Add(steps, u), alpha), INT64), g.cast(g.op.Mul(u, alpha), INT64))
    last = g.const(np.arange(o) == o - 1)
    result: Value = g.op.Where(last, end, places)
    return result


RULES: list[Rule] = [
    *[Rule(f"aten::fractional_max_pool{n}d.default", of_rank(fractional_max_pool, n)) for n in (2, 3)],
    *[
        Rule(f"aten::fractional_max_pool{n}d.default", of_rank(fractional_max_pool_exact, n), **SKIPS_NAN)
        for n in (2, 3)
    ],
]
