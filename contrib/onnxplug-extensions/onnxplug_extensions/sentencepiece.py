"""Llama's tokenizer: a model of SentencePiece made of its tokenizer.json, by the operator SentencepieceTokenizer."""

from __future__ import annotations

import re
from typing import Any

import onnx_ir as ir
import torch

from onnxplug_extensions import DOMAIN
from onnxplug_extensions.byte_pairs import replaced
from onnxplug_extensions.character_map import byte_pair_model
from onnxplug_extensions.parts import About, TransformersEncoder, added, framed, refuse, sequence, typed, vocabulary

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_UNKNOWN = "<unk>"
#: Both ways in which transformers puts the mark of a space before a text.
_SPLIT = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
_NORMALIZER = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


class Llama(TransformersEncoder):
    """A tokenizer like Llama's, with SentencePiece's merges: any two pieces that make a third, the earlier third first.

    Raises:
        UsageError: It differs from Llama's in a way that a model of SentencePiece can't have.
    """

    def __init__(self, tokenizer: Any, about: About) -> None:
        super().__init__(tokenizer, about)
        model = about["model"]
        refuse(not model["byte_fallback"], "it is not like Llama's")
        tokens = vocabulary(about)
        refuse(not set(tokens) >= {*_BYTES, _UNKNOWN}, f"its vocabulary lacks a byte, or {_UNKNOWN}")
        normal, split = sequence(about["normalizer"]), about["pre_tokenizer"]
        self._every = [dict(part) for part in normal] == _NORMALIZER and split is None
        refuse(not self._every and (bool(normal) or split != _SPLIT), "it does not put ▁ before a text as Llama does")
        special = {content for content, token in added(about).items() if token["special"]}
        refuse(len(special) != len(added(about)), "it has added tokens, which are found anywhere in a text")
        refuse(not special <= set(tokens), "special tokens are not in its vocabulary")
        self._special = sorted(special - {_UNKNOWN})
        self._pieces = (tokens, set(self._special), _UNKNOWN, _ranks(model, set(tokens)))

    def emit(self, g: Any, texts: Any, max_length: int) -> tuple[Any, Any]:
        """SentencepieceTokenizer of all texts, whose numbers in one vector become a row for each text."""
        off = g.const([False])
        options = [g.const([0]), g.const([0.0]), off, off, off]
        contrib, model = g.domain(DOMAIN, 1), byte_pair_model(*self._pieces)
        texts = replaced(g, texts, r"^(?s:.)" if self._every else "^[^ ▁]", r"▁\0")
        if self._special:  # no mark before a special token
            texts = replaced(g, texts, f"^▁({'|'.join(map(re.escape, self._special))})", r"\1")
        numbers, starts = contrib.SentencepieceTokenizer(texts, *options, model=model, _outputs=2)
        numbers, starts = typed(numbers, ir.DataType.INT32), typed(starts, ir.DataType.INT64)
        axis = g.const([0])
        first = g.op.Slice(starts, axis, g.const([-1]), axis)
        lengths = g.op.Unsqueeze(g.op.Sub(g.op.Slice(starts, [1], [2**31 - 1], axis), first), [1])
        longest = g.op.ReduceMax(g.op.Concat(g.op.Reshape(lengths, [-1]), axis, axis=0), axis, keepdims=0)
        places = g.op.Range(g.const(0), longest, g.const(1))
        # One number more, for places behind the end of the last text.
        numbers = g.op.Concat(g.cast(numbers, torch.int64), axis, axis=0)
        last = g.op.Sub(g.op.Size(numbers), g.const(1))
        tokens = g.op.Gather(numbers, g.op.Min(g.op.Add(g.op.Unsqueeze(first, [1]), places), last), axis=0)
        mask = g.cast(g.op.Less(places, lengths), torch.int64)
        return framed(g, tokens, mask, max_length, self.before, self.after)


def _ranks(model: Any, tokens: set[str]) -> dict[str, int]:
    """The rank of each piece by its merges, the least first.

    Raises:
        UsageError: SentencePiece would merge other pieces, or in another order: a merge that makes a piece is missing,
            or a piece's merges are apart.
    """
    ranks: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    for rank, merge in enumerate(model["merges"]):
        left, right = merge if not isinstance(merge, str) else merge.split(" ")
        piece = left + right
        pairs.add((left, right))
        previous = ranks.setdefault(piece, rank)
        refuse(previous != rank and rank - previous >= len(piece), "merges of a piece are apart")
    for piece in tokens - _BYTES:
        for cut in range(1, len(piece)):
            pair = (piece[:cut], piece[cut:])
            refuse(pair not in pairs and set(pair) <= tokens, f"it never merges {pair[0]!r} and {pair[1]!r}")
    return ranks
