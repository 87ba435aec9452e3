"""Whether an operator such as ``reshape`` gave a view or a copy: decided by the expressions of sizes and strides.

An example, ``y.t().contiguous()`` of a ``y`` with the sizes ``[s0, 4]`` and the strides ``[4, 1]``: the operand has the sizes
``[4, s0]`` and the strides ``[1, 4]``, a contiguous tensor ``[s0, 1]``. They differ at every size but where ``s0`` is 1, so the
result is a copy; if one of the two tensors is written while the other is still read, the warning says "right only where rows !=
1".
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.functionalize.effects import effects_of
from onnxplug.functionalize.sizes import Ranges, Sizes
from onnxplug.torch_private import OpOverload, is_alias_of

COPY = "copy"
SAME = "same"
RESHAPED = "reshaped"
PERMUTED = "permuted"

#: Operators that return a view wherever strides allow it.
_RESHAPES = frozenset("reshape flatten".split())
#: Composite operators whose dtypes, ranks and attributes decide between a view and a copy, whatever the sizes are.
_BY_ATTRIBUTES = frozenset(
    "to type_as float double half bfloat16 int long bool positive resolve_conj resolve_neg real atleast_1d atleast_2d atleast_3d "
    "dropout feature_dropout alpha_dropout feature_alpha_dropout linalg_diagonal conj_physical einsum".split()
)
_CHANNELS_LAST: dict[Any, list[int]] = {torch.channels_last: [1, 3, 2, 0], torch.channels_last_3d: [1, 4, 3, 2, 0]}


class Sharing(NamedTuple):
    """How an operator's result lies in the memory of its argument.

    Attributes:
        kind: ``COPY``: in memory of its own; ``SAME``: it is the argument, element for element; ``RESHAPED``: the same elements
            in the same order, of another shape; ``PERMUTED``: with its axes in another order.
        order: The order of the axes.
        conditions: The conditions on sizes for that; sympy expressions of torch's symbols.
    """

    kind: str
    order: tuple[int, ...] = ()
    conditions: tuple[Any, ...] = ()


def sharing(node: torch.fx.Node, base: torch.fx.Node, ranges: Ranges) -> Sharing | None:
    """How a node's result lies in the memory of one of its arguments.

    Args:
        ranges: The sizes that the model may have.

    Returns:
        The layout; ``None`` where it isn't known. Where the ranges do not decide, the general case is assumed, in which sizes are
        not 1 and strides are not equal by chance, with the condition for that.
    """
    target: Any = node.target
    result: Any = node.meta.get("val")
    whole: Any = base.meta.get("val")
    if target.namespace != "aten" or not _is_plain(result) or not _is_plain(whole) or result.dtype != whole.dtype:
        return None
    name = target._schema.name.partition("::")[2]
    sizes = _Assumed(ranges)
    is_first = bool(node.args) and node.args[0] is base
    if name in _RESHAPES and is_first:
        is_view = sizes.allow_view(whole, result.shape)
        kind = Sharing(RESHAPED) if is_view else Sharing(COPY)
    elif name == "ravel" and is_first:  # contiguous().view(-1)
        kind = Sharing(RESHAPED) if sizes.are_contiguous(whole, None) else Sharing(COPY)
    elif name == "contiguous":
        memory_format: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("memory_format")
        kind = Sharing(SAME) if sizes.are_contiguous(whole, memory_format) else Sharing(COPY)
    elif any(r.alias_info is not None for r in target._schema.returns) or _is_same_for_all_sizes(node, name):
        within = _within(result, whole, is_first, sizes) if is_alias_of(result, whole) else Sharing(COPY)
        if within is None:
            return None
        kind = within
    else:
        return None
    return kind._replace(conditions=tuple(sizes.conditions))


def source_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node in whose memory a node's tensor lies: the base through all views between; the node itself if it is no view."""
    while (base := _viewed(node)) is not None:
        node = base
    return node


def _viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor that a node is a view of, at all sizes, in the same elements."""
    call: Any = node.args[0] if node.target is operator.getitem and node.args else node
    if not isinstance(call, torch.fx.Node) or not isinstance(call.target, OpOverload) or not call.args:
        return None
    base, effects = call.args[0], effects_of(call.target)
    if effects.written or not effects.aliases or not isinstance(base, torch.fx.Node):
        return None
    view, whole = node.meta.get("val"), base.meta.get("val")
    if not isinstance(view, torch.Tensor) or not isinstance(whole, torch.Tensor) or not is_alias_of(view, whole):
        return None
    if view.dtype != whole.dtype or view.is_conj() != whole.is_conj() or view.is_neg() != whole.is_neg():
        return None
    if any(r.alias_info is not None for r in call.target._schema.returns) or call is not node:
        return base
    layout = sharing(node, base, {})
    return base if layout is not None and layout.kind != COPY and not layout.conditions else None


def filled_order(tensor: torch.Tensor) -> list[int] | None:
    """The order of the axes in which a tensor fills its memory from the start; ``None`` where it may not at some size."""
    order = list(range(tensor.dim()))
    if all(isinstance(number, int) for number in _numbers(tensor)):
        order.sort(key=lambda axis: (-tensor.stride()[axis], axis))
    elif not isinstance(tensor.storage_offset(), int):
        return None
    sizes = _Assumed({})
    is_filled = tensor.storage_offset() == 0 and sizes.are_contiguous(tensor.permute(order), None)
    return order if is_filled and not sizes.conditions else None


def _is_plain(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and val.layout is torch.strided and not val.is_conj() and not val.is_neg()


def _is_same_for_all_sizes(node: torch.fx.Node, name: str) -> bool:
    """Whether an operator gives a view, or a copy, at all sizes alike."""
    if not any(isinstance(n, torch.SymInt) for a in (node, *node.all_input_nodes) for n in _numbers(a.meta.get("val"))):
        return True
    # A memory format depends on strides.
    formats = (*node.args, *node.kwargs.values())
    return name in _BY_ATTRIBUTES and not any(
        isinstance(a, torch.memory_format) and a in _CHANNELS_LAST for a in formats
    )


def _numbers(val: Any) -> Sequence[Any]:
    return (*val.shape, *val.stride(), val.storage_offset()) if isinstance(val, torch.Tensor) else (val,)


def _expr(number: Any) -> Any:
    """A size or stride as sympy's expression."""
    import sympy

    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


class _Assumed(Sizes):
    """Facts about sizes from their ranges, and assumptions beyond them."""

    def __init__(self, ranges: Ranges) -> None:
        super().__init__(ranges)
        self.conditions: list[Any] = []

    def open_factors(self, a: Any, b: Any) -> list[Any]:
        """The factors of the difference of two numbers that may be 0: they differ where none is."""
        return [factor for factor in self.difference(a, b) if self.may_be_zero(factor)]

    def assume_distinct(self, a: Any, b: Any) -> None:
        """Assumes from here on that two numbers differ, where it is not known."""
        import sympy

        for factor in self.open_factors(a, b):
            constant, rest = (-factor if factor.could_extract_minus_sign() else factor).as_coeff_Add()
            self.conditions.append(sympy.Ne(rest, -constant))
            if rest.is_Symbol:
                low, high = self.range_of(rest)
                self.ranges[rest] = low + (-constant == low), high

    def allow_view(self, tensor: torch.Tensor, shape: Sequence[Any]) -> bool:
        """Whether a tensor can be seen in another shape without a copy, as ``torch.Tensor.view`` decides it.

        Axes whose strides fit each other are one piece of memory; the new axes must divide into these pieces.
        """
        one = _expr(1)
        axes = [(_expr(n), _expr(s)) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        axes = [axis for axis in axes if not self.are_equal(axis[0], one)]
        wanted = [n for n in map(_expr, shape) if not self.are_equal(n, one)]
        while axes:
            count, step = axes.pop()
            while axes and self.are_equal(axes[-1][1], count * step):
                count = axes.pop()[0] * count
            taken = self._prefix(wanted[::-1], count)
            if taken is None and axes:
                # Nor do they fit by chance.
                self.assume_distinct(axes[-1][0], one)
                self.assume_distinct(axes[-1][1], count * step)
            if taken is None:
                return self._is_all(wanted, count, axes)
            del wanted[len(wanted) - taken :]
        return True

    def _prefix(self, numbers: Sequence[Any], product: Any) -> int | None:
        """How many of the first numbers multiply to a product."""
        partial = _expr(1)
        for taken in range(len(numbers) + 1):
            if self.are_equal(partial, product):
                return taken
            partial = partial * numbers[taken] if taken < len(numbers) else partial
        return None

    def _is_all(self, numbers: Sequence[Any], product: Any, axes: Sequence[Any]) -> bool:
        """Whether the remaining new axes make up the last piece; otherwise it is assumed that no part of them makes up a piece."""
        if not axes:
            return True
        partial = _expr(1)
        for number in (*reversed(numbers), None):
            if self.is_above(partial, product):
                break
            self.assume_distinct(partial, product)
            partial = partial if number is None else partial * number
        return False

    def are_contiguous(self, tensor: torch.Tensor, memory_format: torch.memory_format | None) -> bool:
        """Whether a tensor lies in memory in a format: each axis contiguous with the next, axes of size 1 anyhow."""
        one = expected = _expr(1)
        order = _CHANNELS_LAST.get(memory_format, list(reversed(range(tensor.dim()))))
        wrong = []
        for axis in order if len(order) == tensor.dim() else ():
            size, step = _expr(tensor.shape[axis]), _expr(tensor.stride(axis))
            if not self.are_equal(size, one) and not self.are_equal(step, expected):
                wrong.append((size, step, expected))
            expected = expected * size
        if not wrong:
            return len(order) == tensor.dim()
        # One axis is enough: the axis with the fewest assumptions.
        size, step, expected = min(
            wrong, key=lambda w: len(self.open_factors(w[0], one)) + len(self.open_factors(w[1], w[2]))
        )
        self.assume_distinct(size, one)
        self.assume_distinct(step, expected)
        return False


def _within(view: torch.Tensor, base: torch.Tensor, is_first: bool, sizes: _Assumed) -> Sharing | None:
    """How a view of a whole tensor lies in it; ``is_first``: the tensor is the first argument of the view's operator."""
    places = [[(_expr(n), _expr(s)) for n, s in zip(t.shape, t.stride(), strict=True)] for t in (base, view)]
    if _expr(view.storage_offset()) != _expr(base.storage_offset()):
        return None
    if places[0] == places[1]:
        return Sharing(SAME)
    one = _expr(1)
    proper = [[place for place in axes if not sizes.are_equal(place[0], one)] for axes in places]
    if proper[0] == proper[1] and is_first:
        return Sharing(RESHAPED)
    if sorted(places[0], key=str) == sorted(places[1], key=str):
        order: list[int] = []
        for place in places[1]:
            order.append(next(i for i, p in enumerate(places[0]) if p == place and i not in order))
        return Sharing(PERMUTED, tuple(order))
    return None
