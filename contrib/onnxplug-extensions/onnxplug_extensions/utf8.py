"""Decoding of UTF-8 in rows of symbols, bytes among them: invalid bytes become U+FFFD, as in decoders of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Symbols: 0 to 255 are bytes, then U+FFFD, the empty text, and all other pieces of text.
REPLACED, NOTHING, OTHERS = 256, 257, 258
#: By byte, how many bytes follow the first byte of a character: -1 for a continuation byte, -2 for a byte that UTF-8
#: never has.
_FOLLOWING = np.concatenate(
    [
        np.full(count, value)
        for count, value in ((128, 0), (64, -1), (2, -2), (30, 1), (16, 2), (5, 3), (11, -2), (1, 0))
    ]
)
#: By first byte, the bounds of the second byte.
_BOUNDS = np.tile([[0x80], [0xBF]], 257)
for _first, _row, _bound in ((0xE0, 0, 0xA0), (0xED, 1, 0x9F), (0xF0, 0, 0x90), (0xF4, 1, 0x8F)):
    _BOUNDS[_row, _first] = _bound


def symbols_of(g: Any, tokens: Any, table: Sequence[Sequence[int]]) -> Any:
    """The symbols of rows of tokens: int64, [rows, most symbols of a row and one], with ``NOTHING`` at the end.

    Args:
        g: The graph.
        tokens: int64, [rows, length], not empty; each row begins with a token that has symbols.
        table: The symbols of each token.
    """
    counts = np.array([len(row) for row in table])
    flat = np.array([symbol for row in table for symbol in row])
    lengths = g.op.Gather(g.const(counts), tokens, axis=0)
    ends = g.op.CumSum(lengths, g.const(1))
    begins = g.op.Sub(ends, lengths)
    width = g.op.Add(g.op.ReduceMax(ends, keepdims=0), g.const(1))
    shape = g.op.Concat(g.op.Shape(tokens, start=0, end=1), g.op.Unsqueeze(width, g.const([0])), axis=0)
    marks = g.op.ScatterElements(
        g.op.Expand(g.const(0), shape), begins, g.op.Expand(g.const(1), g.op.Shape(begins)), axis=1, reduction="add"
    )
    owners = g.op.Sub(g.op.CumSum(marks, g.const(1)), g.const(1))
    places = g.op.Range(g.const(0), width, g.const(1))
    firsts = g.op.Sub(g.op.Gather(g.const(counts.cumsum() - counts), tokens, axis=0), begins)
    index = g.op.Add(g.op.GatherElements(firsts, owners, axis=1), places)
    found = g.op.Gather(g.const(flat), g.op.Min(index, g.const(len(flat) - 1)), axis=0)
    last = g.op.Slice(ends, g.const([-1]), g.const([2**62]), g.const([1]))
    return g.op.Where(g.op.Less(places, last), found, g.const(NOTHING))


def with_replacements(g: Any, symbols: Any, runs: bool) -> Any:
    """Rows of symbols in which invalid bytes are ``REPLACED``.

    Args:
        g: The graph.
        symbols: int64, [rows, length].
        runs: Whether every byte of a run of bytes is replaced where the run is invalid (SentencePiece); otherwise each
            longest beginning of a character is replaced by one U+FFFD, as in Python's and Rust's decoders.
    """
    byte = g.op.Min(symbols, g.const(REPLACED))
    following = g.op.Gather(g.const(_FOLLOWING), byte, axis=0)
    low, high = (g.op.Gather(g.const(bounds), byte, axis=0) for bounds in _BOUNDS)
    chain: Any = None
    have: Any = None
    for place in (1, 2, 3):
        after = _shifted(g, byte, place, REPLACED)
        bounds = (low, high) if place == 1 else (g.const(0x80), g.const(0xBF))
        there = g.op.And(g.op.GreaterOrEqual(after, bounds[0]), g.op.LessOrEqual(after, bounds[1]))
        there = g.cast(g.op.And(there, g.op.GreaterOrEqual(following, g.const(place))), symbols.dtype)
        chain = there if chain is None else g.op.Mul(chain, there)
        have = chain if have is None else g.op.Add(have, chain)
    whole = g.op.Equal(have, following)
    reach = g.op.Where(whole, have, g.op.Neg(have))
    kept, covered = whole, g.const(False)
    for place in (1, 2, 3):
        before = _shifted(g, reach, -place, 0)
        kept = g.op.Or(kept, g.op.GreaterOrEqual(before, g.const(place)))
        broken = g.op.LessOrEqual(before, g.const(-place))
        covered = g.op.Or(covered, broken)
    if not runs:
        return g.op.Where(kept, symbols, g.op.Where(covered, g.const(NOTHING), g.const(REPLACED)))
    other = g.op.Equal(byte, g.const(REPLACED))
    run = g.op.CumSum(g.cast(other, symbols.dtype), g.const(1))
    none = g.op.Expand(g.const(0), g.op.Add(g.op.Shape(symbols), g.const([0, 1])))
    bad = g.op.ScatterElements(none, run, g.cast(g.op.Not(kept), symbols.dtype), axis=1, reduction="add")
    bad = g.op.Greater(g.op.GatherElements(bad, run, axis=1), g.const(0))
    return g.op.Where(g.op.And(bad, g.op.Not(other)), g.const(REPLACED), symbols)


def _shifted(g: Any, rows: Any, by: int, filler: int) -> Any:
    """Each element's neighbour ``by`` places further on, or before it where ``by`` is negative."""
    pads = g.const([0, max(-by, 0), 0, max(by, 0)])
    start, end = (by, 2**62) if by > 0 else (0, by)
    return g.op.Slice(g.op.Pad(rows, pads, g.const(filler)), g.const([start]), g.const([end]), g.const([1]))
