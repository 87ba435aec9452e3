"""torch's assumptions about sizes while it traces a model: no size is 0, and each input keeps its axes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxplug.capture.locations import source_location
from onnxplug.capture.questions import Replaced, name_of
from onnxplug.errors import CaptureError
from onnxplug.torch_private import OpOverload, SymT

#: torch's notation for an input.
_INPUT = re.compile(r"L\['(\w+)'\]")


def _make_symbol(original: Callable[..., Any], prefix: Any, number: int, **assumptions: Any) -> Any:
    if prefix is SymT.SIZE and assumptions.get("positive"):
        assumptions = {**assumptions, "positive": None, "nonnegative": True}
    return original(prefix, number, **assumptions)


def _produce_guards(
    original: Callable[..., Any], env: ShapeEnv, placeholders: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    for tensor, source, context in zip(placeholders, sources, kwargs.get("input_contexts") or (), strict=False):
        if isinstance(tensor, torch.Tensor) and _has_other_axes(env, tensor, source, context):
            name = _INPUT.sub(r"\1", name_of(source))
            raise CaptureError(
                f"{_change_of_axes(sys._getframe(2))} changes the axes of the input {name}",
                hint="Take a view of it, as x = x.t().",
            )
    guards, ranges = env.guards, env.var_to_range
    env.guards = []
    env.var_to_range = {s: env._default_value_range(True) if s.is_nonnegative else r for s, r in ranges.items()}
    try:
        return original(env, placeholders, sources, *args, **kwargs)
    finally:
        env.guards, env.var_to_range = guards, ranges


def _change_of_axes(frame: FrameType | None) -> str:
    """The first call of the traced graph that changes the axes of an input in place, in words."""
    while frame is not None and not isinstance(frame.f_locals.get("gm"), torch.fx.GraphModule):
        frame = frame.f_back
    for node in frame.f_locals["gm"].graph.nodes if frame is not None else ():
        changes = isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags
        if changes and node.args[0].op == "placeholder":
            return f"the call of {node.target} at {source_location(node) or 'unknown source'}"
    return "the model"


def _has_other_axes(env: ShapeEnv, tensor: torch.Tensor, source: Any, context: Any) -> bool:
    """Whether an input of the trace has lost an axis, or has one that another axis was before."""
    if tensor.dim() != len(getattr(context, "constraint_sizes", tensor.shape)):
        return True
    for axis, size in enumerate(tensor.shape):
        symbol = size.node._expr if isinstance(size, torch.SymInt) else None
        names = [name_of(of_symbol) for of_symbol in env.var_to_sources.get(symbol, ())]
        own = f"{name_of(source)}.size()["
        if any(name.startswith(own) for name in names) and f"{own}{axis}]" not in names:
            return True
    return False


#: While it holds, no size is assumed to be positive: otherwise an example's size of 0 is not symbolic.
zero_is_a_size = Replaced(symbolic_shapes, "make_symbol", _make_symbol)
#: While it holds, torch does not refuse a named dimension because of the model's questions: they are judged afterwards.
any_size_is_accepted = Replaced(ShapeEnv, "produce_guards_verbose", _produce_guards)
