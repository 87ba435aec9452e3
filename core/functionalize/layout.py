"""Whether an operator such as ``reshape`` gave a view or a copy: a matter of strides, worked out at several sizes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.torch_private import is_alias_of, pytree

#: The most combinations of sizes at which an operator is looked at.
_MOST = 48
#: Sizes of one dimension: first those of which nothing is special.
_SIZES = (5, 7, 2, 3, 4, 8, 64, 1)

COPY = "copy"
SAME = "same"
RESHAPED = "reshaped"
PERMUTED = "permuted"


class Sharing(NamedTuple):
    """How an operator's result lies in the memory of its argument.

    Attributes:
        kind: ``COPY``: in memory of its own; ``SAME``: it is the argument, element for element; ``RESHAPED``: the same elements
            in the same order, of another shape; ``PERMUTED``: with its axes in another order.
        order: The order of the axes.
        conditions: What sizes must fulfil for that; sympy's expressions of torch's symbols.
    """

    kind: str
    order: tuple[int, ...] = ()
    conditions: tuple[Any, ...] = ()


Allowed = Callable[[Mapping[Any, Any]], bool]
"""Whether a model may have such sizes: symbol to sympy's integer."""


def sharing(node: torch.fx.Node, base: torch.fx.Node, allowed: Allowed) -> Sharing | None:
    """How a node's result lies in the memory of one of its arguments.

    The operator is run on tensors without data, which have the argument's strides. Where sizes are dynamic it is run at several,
    and what the sizes must be where it isn't the same at all is found out.

    Args:
        node: The node.
        base: The argument.
        allowed: Tells which sizes the model may have.

    Returns:
        The layout; ``None`` where it isn't known, or follows no simple condition on the sizes.
    """
    target: Any = node.target
    if target.namespace != "aten" or not _is_plain(base.meta.get("val")):
        return None
    symbols = _symbols(node)
    if not symbols:
        return _at(node, base, {})
    found = [(sizes, kind) for sizes in _samples(symbols, allowed) if (kind := _at(node, base, sizes)) is not None]
    if len(found) < 2:
        return None
    kinds = {kind for _, kind in found}
    if kinds == {Sharing(SAME), Sharing(RESHAPED)}:
        return Sharing(RESHAPED)
    generic = found[0][1]
    if generic.kind == RESHAPED:
        found = [(sizes, generic if kind.kind == SAME else kind) for sizes, kind in found]
    others = [sizes for sizes, kind in found if kind != generic]
    if not others:
        return generic
    conditions = _separating(base, symbols, others, [sizes for sizes, kind in found if kind == generic])
    return generic._replace(conditions=conditions) if conditions is not None else None


def _is_plain(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and val.layout is torch.strided and not val.is_conj() and not val.is_neg()


def _symbols(node: torch.fx.Node) -> list[Any]:
    """The symbols of the sizes that a node's arguments have, and are."""
    found: set[Any] = set()
    for argument in node.all_input_nodes:
        val = argument.meta.get("val")
        parts = (*val.shape, *val.stride(), val.storage_offset()) if isinstance(val, torch.Tensor) else (val,)
        for part in parts:
            if isinstance(part, torch.SymInt):
                found |= part.node.expr.free_symbols
    return sorted(found, key=str)


def _samples(symbols: Sequence[Any], allowed: Allowed) -> list[dict[Any, Any]]:
    """Sizes to look at; in the first no two are the same."""
    import sympy

    chance = random.Random(0)
    first = [_SIZES[0] + 2 * i for i in range(len(symbols))]
    if len(_SIZES) ** len(symbols) <= _MOST:
        tried: Iterable[Sequence[int]] = itertools.product(_SIZES, repeat=len(symbols))
    else:
        single = [[1 if i == j else n for j, n in enumerate(first)] for i in range(len(symbols))]
        pairs = [[a if i == j else n for j, n in enumerate(first)] for i in range(len(symbols)) for a in (2, 3, 4, 8)]
        equal = [[n] * len(symbols) for n in (1, 2, 4, 8)]
        drawn = [[chance.choice(_SIZES) for _ in symbols] for _ in range(_MOST)]
        tried = [*single[:_MOST], *pairs[:_MOST], *equal, *drawn]
    made = [dict(zip(symbols, map(sympy.Integer, sizes), strict=True)) for sizes in (first, *tried)]
    return [sizes for sizes in made if allowed(sizes)]


def _number(value: Any, sizes: Mapping[Any, Any]) -> int:
    """A size at given sizes.

    Raises:
        ValueError: It is no number of elements.
    """
    if not isinstance(value, torch.SymInt):
        return int(value)
    number = value.node.expr.xreplace(dict(sizes))
    if not number.is_Integer or number < 0:
        raise ValueError(f"{value} is no size")
    return int(number)


def _stand_in(val: Any, sizes: Mapping[Any, Any]) -> Any:
    """A tensor without data that lies in memory as a fake one does, at given sizes."""
    if isinstance(val, torch.SymInt):
        return _number(val, sizes)
    if not isinstance(val, torch.Tensor):
        return val
    shape = [_number(n, sizes) for n in val.shape]
    strides = [_number(n, sizes) for n in val.stride()]
    offset = _number(val.storage_offset(), sizes)
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if all(shape) else 1
    memory = torch.empty(offset + extent, dtype=val.dtype, device="meta")
    return memory.as_strided(shape, strides, offset)


def _at(node: torch.fx.Node, base: torch.fx.Node, sizes: Mapping[Any, Any]) -> Sharing | None:
    """The layout at given sizes; ``None`` where the operator rejects them, or the layout is none of those that are known."""
    try:
        known = {argument: _stand_in(argument.meta.get("val"), sizes) for argument in node.all_input_nodes}
        bound: Any = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
        args, kwargs = pytree.tree_map_only(torch.fx.immutable_collections.immutable_list, list, bound)
        args = ["meta" if _is_device_of(value, base) else value for value in args]
        kwargs = {name: "meta" if _is_device_of(value, base) else value for name, value in kwargs.items()}
        with torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError, IndexError, NotImplementedError):
        return None
    whole = known[base]
    if not isinstance(result, torch.Tensor) or not result.numel() or result.dtype != whole.dtype:
        return None
    if not is_alias_of(result, whole):
        aliased = any(isinstance(v, torch.Tensor) and is_alias_of(result, v) for v in known.values())
        return None if aliased else Sharing(COPY)
    return _within(result, whole, bool(node.args) and node.args[0] is base)


def _is_device_of(value: Any, base: torch.fx.Node) -> bool:
    return isinstance(value, torch.device) and value == base.meta["val"].device


def _within(view: torch.Tensor, base: torch.Tensor, is_first: bool) -> Sharing | None:
    """How a view of all of a tensor lies in it; ``is_first``: the tensor is the first argument of what makes the view."""
    if view.storage_offset() != base.storage_offset() or view.numel() != base.numel():
        return None
    if view.shape == base.shape and _same_strides(view, base):
        return Sharing(SAME)
    try:
        reshaped = base.view(view.shape)
    except RuntimeError:
        reshaped = None
    if reshaped is not None and is_first and _same_strides(view, reshaped):
        return Sharing(RESHAPED)
    if view.dim() == base.dim():
        places = [list(zip(t.shape, t.stride(), strict=True)) for t in (base, view)]
        if sorted(places[0]) == sorted(places[1]):
            order = []
            for place in places[1]:
                order.append(next(i for i, p in enumerate(places[0]) if p == place and i not in order))
            return Sharing(PERMUTED, tuple(order))
    return None


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(n == 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def _separating(
    base: torch.fx.Node, symbols: Sequence[Any], wrong: list[dict[Any, Any]], right: list[dict[Any, Any]]
) -> tuple[Any, ...] | None:
    """Conditions that together hold for none of some sizes, and for as many as possible of others."""
    import sympy

    val = base.meta["val"]
    exprs = [n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in (*val.shape, *val.stride())]
    ones = [sympy.Ne(s, 1) for s in symbols]
    pairs = [sympy.Ne(a, b) for a, b in itertools.combinations(dict.fromkeys(exprs), 2)]
    either = [sympy.Or(a, b) for a, b in itertools.combinations(ones, 2)]
    candidates = [c for c in dict.fromkeys([*ones, *either, *pairs]) if c.free_symbols]
    chosen: list[Any] = []
    while wrong:
        rated = []
        for candidate in candidates:
            left = [sizes for sizes in wrong if candidate.xreplace(sizes) is sympy.true]
            kept = sum(candidate.xreplace(sizes) is sympy.true for sizes in right)
            if len(left) < len(wrong) and kept:
                rated.append((kept - len(left), candidate, left))
        if not rated:
            return None
        _, best, wrong = max(rated, key=lambda r: r[0])
        chosen.append(best)
    return tuple(chosen)
