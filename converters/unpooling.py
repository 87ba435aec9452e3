"""Max unpooling: the inverse of max pooling with indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.tables import of_rank
from onnxplug.converters.helpers.windows import planes
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def max_unpool(g: GraphBuilder, node: FxNode, spatial: int) -> Value:
    """max_unpool2d(Tensor self, Tensor indices, SymInt[2] output_size) -> Tensor

    Each element is scattered to its index within a plane of zeros.
    """
    x, indices, size = node.args[:3]
    single = rank_of(x) == spatial + 1
    if single:
        x, indices = unsqueeze(g, x, 0), unsqueeze(g, indices, 0)
    out = list(size)[-spatial:]
    batch = [g.dim(x, 0), g.dim(x, 1)]
    zeros = g.op.Expand(g.const(0.0, node.dtype), g.vector([*batch, _product(g, out)]))
    scattered = g.op.ScatterElements(zeros, planes(g, indices), planes(g, x), axis=2)
    result = g.reshape(scattered, [*batch, *out])
    return squeeze(g, result, 0) if single else result


def _product(g: GraphBuilder, sizes: Sequence[int | Value]) -> int | Value:
    values = [size for size in sizes if isinstance(size, Value)]
    static = math.prod(size for size in sizes if isinstance(size, int))
    if not values:
        return static
    result: Value = reduce(g.op.Mul, values)
    return result if static == 1 else g.op.Mul(result, g.const(static))


RULES: list[Rule] = [
    *[Rule(f"aten::max_unpool{n}d.default", of_rank(max_unpool, n)) for n in (2, 3)],
]
