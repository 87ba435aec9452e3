"""Broadcasting to a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of


def expand_to(g: GraphBuilder, x: Value, shape: Sequence[Any], requested: Sequence[Any]) -> Value:
    """``x`` broadcast to a shape.

    An axis that keeps its size is 1 in ONNX's Expand, which leaves larger sizes as they are.
    """
    source: list[Any] = [1] * (len(shape) - rank_of(x)) + list(x.shape or ())
    target: list[Any] = []
    for have, want, argument in zip(source, shape, requested, strict=True):
        if isinstance(argument, int) and argument == -1:
            target.append(1)
        elif isinstance(want, int):
            target.append(want if have != want else 1)
        elif have == want and getattr(want, "value", None) is not None:
            target.append(1)
        else:
            target.append(argument if isinstance(argument, Value) else want)
    if all(isinstance(s, int) and s == 1 for s in target) and len(shape) == rank_of(x):
        return x
    return g.op.Expand(x, g.vector(target))
