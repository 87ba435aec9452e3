"""Token numbers back to text: each token has a piece of text, or bytes, and ``StringJoin`` joins a text's pieces."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from onnxplug import UsageError
from onnxplug.text import shortened
from onnxplug_extensions import DOMAIN
from onnxplug_extensions.byte_pairs import replaced
from onnxplug_extensions.operators import ProcessorModule
from onnxplug_extensions.parts import refuse, sequence, typed
from onnxplug_extensions.utf8 import NOTHING, OTHERS, REPLACED, symbols_of, with_replacements

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Decoder:
    """The processor of ``detokenize``: a tokenizer of transformers, and the piece of text of each of its tokens.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Whether special tokens are left out.

    Attributes:
        name: A name that decoders of the same texts share.

    Raises:
        UsageError: The tokenizer's decoder is unknown, so that a token's piece may depend on its neighbours.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        text = tokenizer.backend_tokenizer.to_str()
        about = json.loads(text)
        kinds = [part["type"] for part in sequence(about["decoder"])]
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._begins_with_space, self._runs = kinds != ["ByteLevel"], kinds != ["ByteLevel"]
        if kinds == ["ByteLevel"]:
            make = _of_bytes(_byte_values())
        elif kinds == ["WordPiece"]:
            decode = tokenizer.backend_tokenizer.decoder.decode
            make = lambda token: decode(["a", token])[1:]  # noqa: E731
        elif kinds in (["Replace", "ByteFallback", "Fuse", "Strip"], ["Replace", "ByteFallback", "Fuse"]):
            first, last = sequence(about["decoder"])[0], sequence(about["decoder"])[-1]
            refuse((first["pattern"], first["content"]) != ({"String": "▁"}, " "), "it replaces other characters")
            self._begins_with_space = last["type"] == "Strip"
            refuse(self._begins_with_space and (last["start"], last["stop"]) != (1, 0), "it strips more than one space")
            make = _of_sentencepiece
        else:
            raise UsageError(
                f"the pieces of this tokenizer's tokens are not known: its decoder is {' and '.join(kinds)}"
            )
        special = set(tokenizer.all_special_ids) if skip_special_tokens else set()
        self.name = f"decoder {hashlib.sha256(f'{sorted(special)} {text}'.encode()).hexdigest()[:16]}"
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        made = ["" if n in special or token is None else make(token) for n, token in enumerate(tokens)]
        if kinds != ["WordPiece"]:  # of which a token alone, at the beginning, may keep its ##
            self._compare(made, tokens)
        others = {piece: OTHERS + n for n, piece in enumerate(dict.fromkeys(x for x in made if isinstance(x, str)))}
        self._symbols = [list(x) if isinstance(x, bytes) else [others[x]] * bool(x) for x in made]
        self._strings = [*(bytes([byte]) for byte in range(REPLACED)), "\ufffd".encode(), b"", *map(str.encode, others)]

    def _compare(self, pieces: list[bytes | str], tokens: Sequence[str]) -> None:
        """Compares pieces with transformers' texts of single tokens, and empties those that its class leaves out.

        Raises:
            UsageError: The tokenizer's class changes the text that its decoder makes.
        """
        for number, wanted in enumerate(self.decode([[number] for number in range(len(pieces))])):
            piece = pieces[number]
            text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
            text = text.removeprefix(" ") if self._begins_with_space else text
            if text != wanted:
                refuse(bool(wanted), f"of its token {tokens[number]!r} alone transformers makes {wanted!r}")
                pieces[number] = ""

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of tokens, as transformers has it."""
        options = {"skip_special_tokens": self._skips, "clean_up_tokenization_spaces": False}
        return [self._tokenizer.decode(list(row), **options) for row in rows]

    def emit(self, g: Any, tokens: Any) -> Any:
        """The texts as a value of a model.

        ``StringJoin`` of an empty tensor ends the process: a row and a column are added in front.
        As in transformers a number behind the last token's is no text. A negative number, which is an error there and
        counts from the end in ONNX, is behind the end of all tables.
        """
        count = len(self._symbols)
        tokens = g.op.Where(g.op.Less(tokens, g.const(count)), tokens, g.const(count))
        tokens = g.op.Where(g.op.Less(tokens, g.const(0)), g.const(count + 1), tokens)
        tokens = g.op.Pad(tokens, g.const([1, 1, 0, 0]), g.const(count))
        table = [*self._symbols, [NOTHING]]
        if any(symbol < REPLACED for row in table for symbol in row):
            symbols = with_replacements(g, symbols_of(g, tokens, table), self._runs)
        else:
            symbols = g.op.Gather(g.const([(row or [NOTHING])[0] for row in table]), tokens, axis=0)
        pieces = g.op.Gather(g.const(np.array(self._strings, dtype=object)), symbols, axis=0)
        joined = g.domain(DOMAIN, 1).StringJoin(pieces, g.const([""]), g.const([1]))
        joined = g.op.Slice(typed(joined, ir.DataType.STRING), [1], [2**62], [0])
        return replaced(g, joined, "^ ", "", once=True) if self._begins_with_space else joined


def _byte_values() -> dict[str, int]:
    """The byte that each character of GPT-2's alphabet stands for: printable characters stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _of_bytes(values: dict[str, int]) -> Any:
    def make(token: str) -> bytes:
        return bytes(values[c] for c in token) if all(c in values for c in token) else token.encode()

    return make


def _of_sentencepiece(token: str) -> bytes | str:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ")


class Detokenizer(ProcessorModule):
    """Token numbers to texts.

    Args:
        tokenizer: A tokenizer of transformers, as ``Tokenizer`` takes it.
        skip_special_tokens: Whether special tokens, such as tokens of the beginning, the end and padding, are left out.

    Raises:
        UsageError: The tokenizer's decoder is unknown, so that a token's text may depend on its neighbours.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        decoder = Decoder(tokenizer, skip_special_tokens)
        super().__init__(decoder.name, decoder)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A vector of strings.

        Args:
            ids: Token numbers, int64, [texts, length].
        """
        return torch.ops.onnxplug_extensions.detokenize(ids, self._name)


class Labels(nn.Module):
    """Numbers of classes to their names.

    Args:
        names: The names, in the order of the numbers.

    Raises:
        UsageError: They are no list of strings.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        if isinstance(names, str | Mapping) or not all(isinstance(name, str) for name in names):
            raise UsageError(
                f"names is a list of strings, got {shortened(repr(names), 100)}",
                hint="Of a configuration of transformers it is list(config.id2label.values()), in the order of the numbers.",
            )
        self._names = json.dumps(list(names))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Strings, of the shape of ``index``."""
        return torch.ops.onnxplug_extensions.named(index, self._names)
