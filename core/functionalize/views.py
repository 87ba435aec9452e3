"""View operators as data: which results alias the first argument, and how a write to the view reaches its base."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

Inverse = Callable[[torch.fx.Graph, torch.fx.Node, torch.fx.Node, Sequence[Any], Any], "torch.fx.Node | None"]
"""``(graph, base, new, args, val)``: the base's value when its view, made with ``args`` after the base, is ``new``.

``base`` is what the base holds before the write, ``val`` the fake tensor that has its shape. ``None``: the view can't be
inverted with these arguments.
"""


#: Outside of training these return the very tensor that they are given.
_DROPOUTS = frozenset(
    (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default)
)


def is_inactive_dropout(node: torch.fx.Node) -> bool:
    """Whether a node is a dropout outside of training, which returns its argument itself."""
    return node.target in _DROPOUTS and len(node.args) == 3 and node.args[2] is False


def invert_item(
    graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, split: Any, args: Sequence[Any], index: int
) -> torch.fx.Node | None:
    """The base's value when item ``index`` of the list of views ``split(base, *args)`` is ``new``; ``None`` as for an inverse."""
    if index < 0:
        return None
    if split is aten.unbind.int:
        return graph.call_function(aten.select_scatter.default, (base, new, args[0] if args else 0, index))
    if split is aten.split.Tensor and isinstance(args[0], int):
        start, size = args[0] * index, args[0]
    elif split is aten.split_with_sizes.default and all(isinstance(s, int) for s in args[0]):
        start, size = sum(args[0][:index]), args[0][index]
    else:
        return None
    axis = args[1] if len(args) > 1 else 0
    return graph.call_function(aten.slice_scatter.default, (base, new, axis, start, start + size, 1))


def _scattered(target: Any) -> Inverse:
    def inverse(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
        return graph.call_function(target, (base, new, *args))

    return inverse


def _itself(target: Any) -> Inverse:
    """For views that are their own inverse."""

    def inverse(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
        return graph.call_function(target, (new, *args))

    return inverse


def _no_change(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    return new


def _permute(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    order = [axis % val.dim() for axis in args[0]]
    return graph.call_function(aten.permute.default, (new, [order.index(axis) for axis in range(val.dim())]))


def _unsqueeze(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    return graph.call_function(aten.squeeze.dim, (new, args[0]))


def _reshaped(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    sizes: list[Any] = []
    for axis, size in enumerate(val.shape):
        if isinstance(size, torch.SymInt):
            node = graph.call_function(aten.sym_size.int, (base, axis))
            node.meta["val"] = size
            size = node
        sizes.append(size)
    return graph.call_function(aten.view.default, (new, sizes))


def _narrow(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    axis, start, length = args
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        return None
    return graph.call_function(aten.slice_scatter.default, (base, new, axis, start, start + length, 1))


def _moved(target: Any) -> Inverse:
    def inverse(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
        return graph.call_function(target, (new, args[1], args[0]))

    return inverse


#: Operators whose result is always a view of their first argument, each with its inverse. ``None``: a write to such a view
#: isn't made functional, but it may be read after its base is written.
VIEWS: dict[Any, Inverse | None] = {
    aten.alias.default: _no_change,
    aten.detach.default: _no_change,
    aten.lift_fresh.default: _no_change,
    aten.t.default: _itself(aten.t.default),
    aten.numpy_T.default: _itself(aten.numpy_T.default),
    aten.mT.default: _itself(aten.mT.default),
    aten.transpose.int: _itself(aten.transpose.int),
    aten.swapaxes.default: _itself(aten.swapaxes.default),
    aten.swapdims.default: _itself(aten.swapdims.default),
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.view.default: _reshaped,
    aten.view_as.default: _reshaped,
    aten.unflatten.int: _reshaped,
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.narrow.default: _narrow,
    aten.movedim.int: _moved(aten.movedim.int),
    aten.movedim.intlist: _moved(aten.movedim.intlist),
    aten.expand.default: None,
    aten.expand_as.default: None,
    aten.unfold.default: None,
    aten.unbind.int: None,
    aten.split.Tensor: None,
    aten.split_with_sizes.default: None,
    aten.chunk.default: None,
    operator.getitem: None,
}
