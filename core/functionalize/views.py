"""View operators as data: which results alias the first argument, and how a write to the view reaches its base.

An example, ``x.t()[1].mul_(2)``: the value of each view after the write, from the inverses of the views, innermost first::

    t = aten.t(x)
    select = aten.select(t, 0, 1)
    mul = aten.mul(select, 2)                             the new value of select
    select_scatter = aten.select_scatter(t, mul, 0, 1)    of t: VIEWS[aten.select.int](graph, t, mul, (0, 1), t's fake tensor)
    t_1 = aten.t(select_scatter)                          of x: VIEWS[aten.t.default]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.capture.quantised import QUANTIZERS

aten = torch.ops.aten

Inverse = Callable[[torch.fx.Graph, torch.fx.Node, torch.fx.Node, Sequence[Any], Any], "torch.fx.Node | None"]
"""``(graph, base, new, args, val)``: the base's value when its view, made with ``args`` after the base, is ``new``.

``base`` is the base's value before the write, ``val`` the fake tensor with its shape. ``None``: the view can't be
inverted with these arguments.
"""


#: Outside of training, or with a probability of 0, these return their argument itself.
_DROPOUTS = frozenset(
    (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default)
)


def returns_argument(node: torch.fx.Node) -> bool:
    """Whether a node returns its argument itself, which its fake result doesn't show: a dropout that drops nothing, say."""
    if node.target is aten.dequantize.self:
        (base,) = node.all_input_nodes
        return bool(base.meta["val"].dtype == node.meta["val"].dtype) and not _may_be_quantised(base)
    return node.target in _DROPOUTS and len(node.args) == 3 and bool(node.args[2] is False or node.args[1] == 0)


def _may_be_quantised(node: torch.fx.Node) -> bool:
    """Whether a value is made of a quantised tensor, whose fake is one of float32, without ``dequantize``."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if node.target in QUANTIZERS:
            return True
        if node.target is not aten.dequantize.self:
            new = set(node.all_input_nodes) - seen
            seen |= new
            pending += new
    return False


#: Operators whose results torch's functionalization takes for copies, with the operator that gives the same views.
_SAFE: dict[Any, Any] = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_chunk.default: aten.chunk.default,
}


def show_views(graph: torch.fx.Graph) -> None:
    """Replaces, in place, operators whose views torch's functionalization takes for copies by operators that it knows."""
    for node in graph.nodes:
        if returns_argument(node):
            node.target, node.args = aten.alias.default, node.args[:1]
        node.target = _SAFE.get(node.target, node.target)


#: Operators that divide a tensor along one axis, each with the position of the axis among the arguments after the tensor; the
#: number itself where the operator has no such argument.
_SPLITS: dict[Any, Callable[[Sequence[Any], int], int]] = {
    **dict.fromkeys(
        (
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.chunk.default,
            aten.tensor_split.sections,
            aten.tensor_split.indices,
            aten.unsafe_split.Tensor,
            aten.unsafe_split_with_sizes.default,
            aten.unsafe_chunk.default,
        ),
        lambda args, rank: args[1] if len(args) > 1 else 0,
    ),
    **dict.fromkeys((aten.vsplit.int, aten.vsplit.array), lambda args, rank: 0),
    **dict.fromkeys((aten.hsplit.int, aten.hsplit.array), lambda args, rank: min(rank - 1, 1)),
    **dict.fromkeys((aten.dsplit.int, aten.dsplit.array), lambda args, rank: 2),
}

#: Operators among them that divide at indices, which may count from the end and need not rise.
_AT_INDICES = frozenset((aten.tensor_split.indices, aten.vsplit.array, aten.hsplit.array, aten.dsplit.array))


def invert_item(
    graph: torch.fx.Graph,
    base: torch.fx.Node,
    new: torch.fx.Node,
    split: Any,
    args: Sequence[Any],
    index: int,
    items: torch.fx.Node,
) -> torch.fx.Node | None:
    """The base's value when one item of the list of views ``split(base, *args)`` is ``new``; ``None`` as for an inverse.

    Args:
        graph, base, new: As for an inverse.
        args: Its arguments after the first.
        items: The list, as it was at some time.
    """
    vals = items.meta["val"]
    if index < 0:
        index += len(vals)
    if split is aten.unbind.int:
        return graph.call_function(aten.select_scatter.default, (base, new, args[0] if args else 0, index))
    if split not in _SPLITS:
        return None
    axis = _SPLITS[split](args, vals[0].dim())
    start: Any = 0
    if split in _AT_INDICES:
        start, end = [0, *args[0], None][index : index + 2]
    else:
        for i in range(index):
            start = _sum(graph, start, _size_of_item(graph, items, i, axis))
        end = _sum(graph, start, _size_of_item(graph, items, index, axis))
    return graph.call_function(aten.slice_scatter.default, (base, new, axis, start, end, 1))


def _size_of_item(graph: torch.fx.Graph, items: torch.fx.Node, index: int, axis: int) -> Any:
    """The size of one tensor of a list along an axis: a number, or a node."""
    val = items.meta["val"][index]
    if isinstance(val.shape[axis], int):
        return val.shape[axis]
    item = graph.call_function(operator.getitem, (items, index))
    item.meta["val"] = val
    size = graph.call_function(aten.sym_size.int, (item, axis))
    size.meta["val"] = val.shape[axis]
    return size


def _scattered(target: Any) -> Inverse:
    def inverse(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
        return graph.call_function(target, (base, new, *args))

    return inverse


def _itself(target: Any) -> Inverse:
    """For views whose inverse is an operator with the same other arguments, mostly the view's own."""

    def inverse(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
        return graph.call_function(target, (new, *args))

    return inverse


def no_change(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    """For views that are their base, element for element."""
    return new


def _permute(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    order = [axis % val.dim() for axis in args[0]]
    return graph.call_function(aten.permute.default, (new, [order.index(axis) for axis in range(val.dim())]))


def _unsqueeze(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    return graph.call_function(aten.squeeze.dim, (new, args[0]))


def reshaped(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    """For views that have their base's elements in the same order."""
    sizes: list[Any] = []
    for axis, size in enumerate(val.shape):
        if isinstance(size, torch.SymInt):
            node = graph.call_function(aten.sym_size.int, (base, axis))
            node.meta["val"] = size
            size = node
        sizes.append(size)
    return graph.call_function(aten.reshape.default, (new, sizes))


def _narrow(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    axis, start, length = args
    if not isinstance(start, int) or start < 0:
        return None
    end = length if start == 0 else _sum(graph, start, length)
    return graph.call_function(aten.slice_scatter.default, (base, new, axis, start, end, 1))


def _sum(graph: torch.fx.Graph, first: Any, second: Any) -> Any:
    """The sum of two numbers, nodes among them."""
    if isinstance(first, int) and isinstance(second, int):
        return first + second
    node = graph.call_function(operator.add, (first, second))
    vals = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in (first, second)]
    node.meta["val"] = vals[0] + vals[1]
    return node


def _moved(target: Any) -> Inverse:
    def inverse(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
        return graph.call_function(target, (new, args[1], args[0]))

    return inverse


def _expanded(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    """Only where nothing is repeated: a write to a repetition is a write to all of them."""
    sizes = args[0]
    if not isinstance(sizes, list | tuple):
        return None
    added = len(sizes) - val.dim()
    repeated = [
        size for size, n in zip(sizes, [1] * added + list(val.shape), strict=True) if isinstance(n, int) and n == 1
    ]
    if any(not isinstance(size, int) or size not in (1, -1) for size in repeated):
        return None
    return reshaped(graph, base, new, args, val)


def _real(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    if not val.dtype.is_complex:
        return new
    return graph.call_function(aten.complex.default, (new, graph.call_function(aten.imag.default, (base,))))


def _imaginary(graph: torch.fx.Graph, base: torch.fx.Node, new: torch.fx.Node, args: Sequence[Any], val: Any) -> Any:
    return graph.call_function(aten.complex.default, (graph.call_function(aten.real.default, (base,)), new))


#: Operators whose result is always a view of their first argument, each with its inverse. ``None``: a write to such a view
#: isn't made functional, but it may be read after its base is written.
VIEWS: dict[Any, Inverse | None] = {
    aten.alias.default: no_change,
    aten.detach.default: no_change,
    aten.lift_fresh.default: no_change,
    aten.t.default: _itself(aten.t.default),
    aten.numpy_T.default: _itself(aten.numpy_T.default),
    aten.mT.default: _itself(aten.mT.default),
    aten.mH.default: _itself(aten.mH.default),
    aten.adjoint.default: _itself(aten.adjoint.default),
    aten.matrix_H.default: _itself(aten.matrix_H.default),
    aten.conj.default: _itself(aten.conj.default),
    aten._conj.default: _itself(aten._conj.default),
    aten._neg_view.default: _itself(aten._neg_view.default),
    aten.view_as_real.default: _itself(aten.view_as_complex.default),
    aten.view_as_complex.default: _itself(aten.view_as_real.default),
    aten.real.default: _real,
    aten.imag.default: _imaginary,
    aten.transpose.int: _itself(aten.transpose.int),
    aten.swapaxes.default: _itself(aten.swapaxes.default),
    aten.swapdims.default: _itself(aten.swapdims.default),
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: reshaped,
    aten.squeeze.dim: reshaped,
    aten.squeeze.dims: reshaped,
    aten.view.default: reshaped,
    aten.view_as.default: reshaped,
    aten.unflatten.int: reshaped,
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.narrow.default: _narrow,
    aten.movedim.int: _moved(aten.movedim.int),
    aten.movedim.intlist: _moved(aten.movedim.intlist),
    aten.moveaxis.int: _moved(aten.moveaxis.int),
    aten.moveaxis.intlist: _moved(aten.moveaxis.intlist),
    aten.as_strided.default: _scattered(aten.as_strided_scatter.default),
    aten.expand.default: _expanded,
    aten.broadcast_to.default: _expanded,
    aten.expand_as.default: None,
    aten.unfold.default: None,
    aten.narrow.Tensor: None,
    aten.view.dtype: None,
    aten.split.sizes: None,
    aten.tensor_split.sections: None,
    aten.tensor_split.indices: None,
    aten.vsplit.int: None,
    aten.vsplit.array: None,
    aten.hsplit.int: None,
    aten.hsplit.array: None,
    aten.dsplit.int: None,
    aten.dsplit.array: None,
    aten.unsafe_split.Tensor: None,
    aten.unsafe_split_with_sizes.default: None,
    aten.unsafe_chunk.default: None,
    aten.unbind.int: None,
    aten.split.Tensor: None,
    aten.split_with_sizes.default: None,
    aten.chunk.default: None,
    operator.getitem: None,
}
