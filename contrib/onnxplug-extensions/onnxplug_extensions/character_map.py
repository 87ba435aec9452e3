"""Models of SentencePiece: a normaliser that maps single characters, and byte pairs.

SentencePiece's file is a protocol buffer; the map in it is a double array, of Darts, from the UTF-8 bytes of the
replaced text to the place of its replacement.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence, Set

_LEAF, _HAS_LEAF = 1 << 31, 1 << 8
_BYTE_PAIRS, _CHARACTERS = 2, 4  # types of models
_NORMAL, _UNKNOWN, _OWN, _BYTE = 1, 2, 4, 6  # types of pieces


def character_model(replacements: Mapping[str, str], kept: Iterable[str], unknown: str) -> bytes:
    """A model that replaces characters, and decodes its tokens to the replaced text.

    Args:
        replacements: Characters to their replacements.
        kept: The characters of the replaced text that are pieces of the model.
        unknown: The text that stands for each run of other characters.
    """
    pieces = [_bytes(1, _text(1, "<unk>") + _number(3, _UNKNOWN)), *(_bytes(1, _text(1, piece)) for piece in kept)]
    trainer = (
        _number(3, _CHARACTERS) + b"".join(_number(field, 2**64 - 1) for field in (41, 42, 43)) + _text(44, unknown)
    )
    normalizer = _bytes(2, _map(replacements)) + _number(3, 0) + _number(4, 1) + _number(5, 0)
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def byte_pair_model(tokens: Sequence[str], special: Set[str], unknown: str, ranks: Mapping[str, int]) -> bytes:
    """A model of byte pairs, with bytes for characters that it lacks.

    Args:
        tokens: The pieces in the order of their numbers.
        special: The pieces that are found in a text before any others.
        unknown: The piece that stands for unknown text.
        ranks: Pieces to the ranks of their merges, the least first.
    """
    pieces = []
    for token in tokens:
        kind = _UNKNOWN if token == unknown else _OWN if token in special else _NORMAL
        kind = _BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else kind
        score = _varint(2 << 3 | 5) + struct.pack("<f", -float(ranks.get(token, len(ranks) * 100)))
        pieces.append(_bytes(1, _text(1, token) + score + _number(3, kind)))
    ids = _number(40, tokens.index(unknown)) + b"".join(_number(field, 2**64 - 1) for field in (41, 42, 43))
    trainer = _number(3, _BYTE_PAIRS) + _number(35, 1) + ids + _text(45, unknown)
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, _number(3, 0) + _number(4, 0) + _number(5, 1))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _map(replacements: Mapping[str, str]) -> bytes:
    places: dict[str, int] = {}
    texts = bytearray()
    for text in replacements.values():
        if text not in places:
            places[text] = len(texts)
            texts += text.encode() + b"\0"
    array = double_array({key.encode(): places[text] for key, text in replacements.items()})
    return struct.pack("<I", len(array)) + array + bytes(texts)


def double_array(values: Mapping[bytes, int]) -> bytes:
    """A trie of Darts: keys without zero bytes, values of 31 bits.

    A node's children are at its base, each with the bits of its label changed; its value, if it has one, is at the base itself.
    """
    root: dict[int, object] = {}
    for key, value in values.items():
        node = root
        for label in key:
            node = node.setdefault(label, {})  # type: ignore[assignment]
        node[-1] = value
    units: dict[int, int] = {0: 0}
    bases: set[int] = set()
    starts: dict[int, int] = {}  # where the search of a base goes on, by the number of children: it never goes back
    pending = [(0, root)]
    while pending:
        place, node = pending.pop()
        labels = [max(label, 0) for label in node]
        start = starts.get(len(labels).bit_length(), 1)
        while (base := start ^ labels[0]) in bases or any(base ^ label in units for label in labels):
            start += 1
        starts[len(labels).bit_length()] = start
        bases.add(base)
        units[place] |= (place ^ base) << 10
        for label, below in node.items():
            if label == -1:
                units[place] |= _HAS_LEAF
                units[base] = _LEAF | below  # type: ignore[operator]
            else:
                units[base ^ label] = label
                pending.append((base ^ label, below))  # type: ignore[arg-type]
    size = (max(units) | 0xFF) + 1
    return struct.pack(f"<{size}I", *(units.get(place, 0) for place in range(size)))
