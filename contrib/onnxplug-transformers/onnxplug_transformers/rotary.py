"""Rotary embeddings in the captured graph, which ``GroupQueryAttention`` computes too, from tables of all places of a text.

H: heads, E: their width.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

_ops = torch.ops.aten
#: Operators that may leave a tensor as it is.
_CONVERSIONS = (_ops.to.dtype, _ops.to.device, _ops._to_copy.default, _ops.slice.Tensor)


class Turned(NamedTuple):
    """Rows before they are turned, [batch, sequence, H * E], and cosines and sines, [places, E / 2]."""

    query: Any
    key: Any
    tables: tuple[Any, Any]


class _Turn(NamedTuple):
    """``x * cos + rotated(x) * sin`` of [batch, H, sequence, E]: the operand, the cosines and the sines."""

    x: Any
    cosines: Any
    sines: Any


class _Angles(NamedTuple):
    """A cosine or sine of places times frequencies, times a number."""

    places: Any
    frequencies: Any
    factor: float


def turned_rows(g: Any, node: Any) -> Turned | None:
    """Queries and keys of an attention before they are turned by the places that the operator counts, else ``None``.

    Args:
        node: A call of ``group_query_attention``.
    """
    turns = [_turn(_heads_of(node.fx.args[i])) for i in (0, 1)]
    if turns[0] is None or turns[1] is None or turns[0][1:] != turns[1][1:]:
        return None
    cosines = _angles(turns[0].cosines, _ops.cos.default)
    sines = _angles(turns[0].sines, _ops.sin.default)
    if cosines is None or cosines != sines:
        return None
    _, last, limit = cosines.places.args
    frequencies = g.interpreter.value_of(cosines.frequencies)
    if last is not node.fx.args[5] or not (g.is_weight(frequencies) or g.stored(frequencies) is not None):
        return None
    query, key = (g.interpreter.value_of(turn.x) for turn in turns if turn is not None)
    dtype, width = node.args[0].dtype, query.shape[3]
    stored = torch.float16 if str(dtype) == "FLOAT16" else torch.float32
    if cosines.frequencies.meta["val"].numel() * 2 != width:
        return None
    tables = [
        g.derive(
            frequencies,
            lambda t, wave=wave: _table(t, wave, limit, cosines.factor).to(stored),
            ("rotary", wave.__name__, limit, cosines.factor, stored),
            form=wave.__name__,
        )
        for wave in (torch.cos, torch.sin)
    ]
    rows = [
        g.op.Reshape(g.op.Transpose(x, perm=[0, 2, 1, 3]), g.const([0, 0, x.shape[1] * width])) for x in (query, key)
    ]
    return Turned(rows[0], rows[1], (tables[0], tables[1]))


def _table(frequencies: torch.Tensor, wave: Any, limit: int, factor: float) -> torch.Tensor:
    table: torch.Tensor = wave(torch.arange(limit, dtype=torch.float32)[:, None] * frequencies.float().reshape(1, -1))
    return table * factor


def joint_rows(node: Any, turned: Turned | None) -> Any:
    """The tensor whose consecutive parts are queries, keys and values before they are turned; else ``None``."""
    heads = [_heads_of(node.fx.args[i]) for i in (0, 1, 2)]
    if turned is not None:
        turns = [_turn(x) for x in heads[:2]]
        heads[:2] = [turn.x if turn is not None else None for turn in turns]
    parts: list[Any] = [_part(_rows_of(x)) for x in heads]
    start = 0
    for part in parts:
        if part is None or part.start != start or not _is_same(part.source, parts[0].source):
            return None
        start += part.width
    return parts[0].source if start == parts[0].source.meta["val"].shape[2] else None


class _Part(NamedTuple):
    """Consecutive columns of [batch, sequence, columns]."""

    source: Any
    start: int
    width: int


def _part(x: Any) -> _Part | None:
    """The columns of another tensor that make ``x``; ``None`` where ``x`` is made otherwise."""
    cut = _made_by(x, _ops.slice.Tensor)
    chosen = _made_by(x, operator.getitem)
    source: Any = cut.args[0] if cut is not None else None
    split = _made_by(chosen.args[0], _ops.split_with_sizes.default, _ops.split.sizes) if chosen is not None else None
    if split is not None and chosen is not None and split.args[2:] in ((-1,), (2,)):
        source, start = split.args[0], sum(split.args[1][: chosen.args[1]])
    elif cut is not None and cut.args[1] in (-1, 2) and (*cut.args[4:], 1)[0] == 1:
        start = cut.args[2] or 0
    else:
        return None
    sizes = source.meta["val"].shape
    width = x.meta["val"].shape[2]
    known = len(sizes) == 3 and all(isinstance(v, int) for v in (sizes[2], start, width))
    return _Part(source, start, width) if known and start >= 0 else None


def _is_same(a: Any, b: Any) -> bool:
    """Whether two nodes compute the same: one node, or two equal calls of one of this package's operators."""
    own = getattr(a.target, "namespace", None) == "onnxplug_transformers"
    return a is b or (own and a.target is b.target and a.args == b.args and a.kwargs == b.kwargs)


def _made_by(x: Any, *targets: Any) -> Any:
    """A node that calls one of these functions, else ``None``."""
    return x if isinstance(x, fx.Node) and x.target in targets else None


def _plain(x: Any) -> Any:
    """A tensor without conversions to its own type, slices of the whole tensor, and empty parts beside it."""
    node: Any = x
    while isinstance(node, fx.Node):
        before: Any = node.args[0] if node.args else None
        if node.target is _ops.cat.default and node.args[1:] == (-1,):
            full = [part for part in before if part.meta["val"].shape[-1] != 0]
            before = full[0] if len(full) == 1 else None
        elif node.target not in _CONVERSIONS:
            before = None
        if before is None:
            break
        old, new = before.meta["val"], node.meta["val"]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            break
        node = before
    return node


def _heads_of(rows: Any) -> Any:
    """[batch, H, sequence, E], of which ``rows`` is [batch, sequence, H * E]."""
    flat = _made_by(_plain(rows), _ops.flatten.using_ints)
    axes = _made_by(flat.args[0], _ops.transpose.int) if flat is not None and flat.args[1:] == (2,) else None
    return _plain(axes.args[0]) if axes is not None and axes.args[1:] == (1, 2) else None


def _rows_of(heads: Any) -> Any:
    """[batch, sequence, H * E], of which ``heads`` is [batch, H, sequence, E]."""
    axes = _made_by(_plain(heads), _ops.transpose.int)
    view = _made_by(axes.args[0], _ops.view.default, _ops.reshape.default) if axes is not None else None
    if axes is None or view is None or axes.args[1:] != (1, 2):
        return None
    rows = view.args[0]
    shape, before = view.meta["val"].shape, rows.meta["val"].shape
    return rows if len(shape) == 4 and len(before) == 3 and shape[:2] == before[:2] else None


def _turn(x: Any) -> _Turn | None:
    """The rotation that makes ``x`` of the two halves of a width; ``None`` where ``x`` is made otherwise."""
    total = _made_by(_plain(x), _ops.add.Tensor)
    products = [_made_by(_plain(part), _ops.mul.Tensor) for part in total.args[:2]] if total is not None else []
    if len(products) != 2 or total is None or total.kwargs.get("alpha", 1) != 1:
        return None
    for plain, other in (products, products[::-1]):
        if plain is None or other is None:
            return None
        for source, cosines in (plain.args, plain.args[::-1]):
            for rotated, sines in (other.args, other.args[::-1]):
                if _is_rotated(rotated, _plain(source)) and all(isinstance(v, fx.Node) for v in (cosines, sines)):
                    return _Turn(_plain(source), cosines, sines)
    return None


def _is_rotated(rotated: Any, x: Any) -> bool:
    """Whether ``rotated`` is ``cat([-x[..., half:], x[..., :half]], -1)``."""
    both = _made_by(rotated, _ops.cat.default)
    if both is None or len(both.args[0]) != 2 or not isinstance(x, fx.Node) or x.meta["val"].dim() != 4:
        return False
    if (both.args[1] if len(both.args) > 1 else 0) not in (-1, 3):
        return False
    negated, low = both.args[0]
    high = _made_by(negated, _ops.neg.default)
    width = x.meta["val"].shape[3]
    if high is None or not isinstance(width, int) or width % 2:
        return False
    return _is_slice(high.args[0], x, width // 2, width) and _is_slice(low, x, 0, width // 2)


def _is_slice(value: Any, x: Any, start: int, end: int) -> bool:
    node = _made_by(value, _ops.slice.Tensor)
    if node is None or _plain(node.args[0]) is not x or node.kwargs:
        return False
    arguments: list[Any] = list(node.args[1:])
    axis, first, last, step = arguments + [0, None, None, 1][len(arguments) :]
    width = x.meta["val"].shape[3]
    return (
        axis in (-1, 3)
        and (first or 0) == start
        and min(last if last is not None else width, width) == end
        and step == 1
    )


def _angles(value: Any, wave: Any) -> _Angles | None:
    """[batch, 1, sequence, E], the same for every head: a wave of angles, each of which it has twice."""
    heads = _made_by(value, _ops.unsqueeze.default)
    x = heads.args[0] if heads is not None and heads.args[1] == 1 else None
    factor = 1.0
    while (node := _made_by(x, _ops.mul.Tensor, _ops.to.dtype)) is not None:
        if node.target is _ops.mul.Tensor:
            if not isinstance(node.args[1], int | float):
                return None
            factor *= node.args[1]
        x = node.args[0]
    waves = _made_by(x, wave)
    twice = _made_by(waves.args[0], _ops.cat.default) if waves is not None else None
    if twice is None or len(twice.args[0]) != 2 or twice.args[0][0] is not twice.args[0][1] or twice.args[1:] != (-1,):
        return None
    return _product(twice.args[0][0], factor)


def _product(angles: Any, factor: float) -> _Angles | None:
    """Places [batch, sequence, 1] times frequencies [E / 2]."""
    product = _made_by(angles, _ops.mul.Tensor)
    for rows, columns in (product.args, product.args[::-1]) if product is not None else ():
        wide = _made_by(_exact(rows), _ops.unsqueeze.default)
        places = wide.args[0] if wide is not None and wide.args[1] in (-1, 2) else None
        counted = _made_by(places, torch.ops.onnxplug_transformers.places.default)
        frequencies = _plain(columns)
        if counted is None or not isinstance(frequencies, fx.Node) or frequencies.meta["val"].dim() != 1:
            continue
        if angles.meta["val"].dtype == torch.float32 == frequencies.meta["val"].dtype:
            return _Angles(counted, frequencies, factor)
    return None


def _exact(x: Any) -> Any:
    """Whole numbers before they become floats."""
    node = _made_by(x, _ops.to.dtype)
    return node.args[0] if node is not None and node.meta["val"].dtype == torch.float32 else x
