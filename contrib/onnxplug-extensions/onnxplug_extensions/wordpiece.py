"""BERT's tokenizer: words cut into pieces.

The operator BertTokenizer cleans text, takes accents off, changes case and splits otherwise than BERT: for a word with
a character that the vocabulary lacks it gives the pieces before it, too. In the model it gets text that is ready.
BERT's steps before the search for pieces depend on single characters and on special tokens: SentencepieceTokenizer
replaces both, by a map made of the tokenizer's own results for each character, and SentencepieceDecoder gives the text.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import onnx_ir as ir
import torch

from onnxplug_extensions import DOMAIN
from onnxplug_extensions.byte_pairs import replaced
from onnxplug_extensions.character_map import character_model
from onnxplug_extensions.parts import About, TransformersEncoder, added, refuse, typed, vocabulary

#: The character that stands for the first special token between the operators, Unicode's first private character: BERT
#: removes it.
_PRIVATE = 0xE000
#: Punctuation that BERT's normaliser leaves as it is, which separates characters while they are normalised.
_BETWEEN = "|"
#: The planes that have characters, and the tags and variation selectors of plane 14; the planes beyond are private.
_CHARACTERS = (range(1, 0xD800), range(0xE000, 0x30000), range(0xE0000, 0xE0200))


class WordPiece(TransformersEncoder):
    """A tokenizer like BERT's.

    Raises:
        UsageError: It differs from BERT's in a way that the operators have no attribute for.
    """

    def __init__(self, tokenizer: Any, about: About) -> None:
        super().__init__(tokenizer, about)
        model, normalizer, split = about["model"], about["normalizer"], about["pre_tokenizer"]
        refuse(normalizer is None or normalizer["type"] != "BertNormalizer", "its normalizer is not BERT's")
        refuse(not normalizer["clean_text"], "it keeps control characters")
        refuse(split is None or split["type"] != "BertPreTokenizer", "it does not split as BERT does")
        refuse(model["max_input_chars_per_word"] != 100, "the greatest length of a word is not 100")
        tokens = vocabulary(about)
        refuse(any("\n" in token or "\r" in token for token in tokens), "a token of its vocabulary has line ends")
        refuse(len(self.before) != 1 or len(self.after) != 1, "it puts no single token before and after a text")
        special = [content for content, token in added(about).items() if token["special"] and content in tokens]
        refuse(len(special) != len(added(about)), "it has added tokens, which are found anywhere in a text")
        refuse(model["unk_token"] not in special, "the token of unknown words is not special")
        self._places = {content: chr(_PRIVATE + place) for place, content in enumerate(special)}
        lines = [self._places.get(token, token) for token in tokens]
        self._unknown = self._places[model["unk_token"]]
        self._prefix = model["continuing_subword_prefix"]
        self._characters = {character for token in tokens if token not in special for character in token}
        self._attributes = {
            "vocab_file": "\n".join(lines),
            **dict.fromkeys(("do_lower_case", "strip_accents", "tokenize_chinese_chars", "do_basic_tokenize"), 0),
            "suffix_indicator": self._prefix,
            "unk_token": self._unknown,
            "cls_token": lines[self.before[0]],
            "sep_token": lines[self.after[0]],
            "pad_token": self._unknown,
            "mask_token": self._unknown,
        }

    @cached_property
    def _replacements(self) -> dict[str, str]:
        """The replacements of characters and special tokens, with spaces around each that is a word of its own."""
        backend = self._tokenizer.backend_tokenizer
        characters = [chr(code) for codes in _CHARACTERS for code in codes if chr(code) != _BETWEEN]
        normal = backend.normalizer.normalize_str(_BETWEEN.join(characters)).split(_BETWEEN)
        pairs = [(_BETWEEN, _BETWEEN), *zip(characters, normal, strict=True)]
        shown = self._shown({part for _, text in pairs for part in text}, backend.pre_tokenizer)
        ready = {character: "".join(shown[part] for part in text) for character, text in pairs}
        known = self._characters
        replaced = {c: text for c, text in ready.items() if text != c and (c in known or text != self._unknown)}
        return replaced | {content: f" {place} " for content, place in self._places.items()}

    def _shown(self, characters: set[str], splitter: Any) -> dict[str, str]:
        """The text for characters of clean text, with spaces around characters that are words of their own."""
        words = iter(splitter.pre_tokenize_str(" ".join(f"a{character}a" for character in characters)))
        shown = {}
        for character in characters:
            known = character if character in self._characters else self._unknown
            first = next(words)[0]
            if first != "a":
                shown[character] = known
            elif next(words)[0] == "a":
                shown[character] = " "
            else:
                shown[character] = f" {known} "
                next(words)
        return shown

    def emit(self, g: Any, texts: Any, max_length: int) -> tuple[Any, Any]:
        """A Loop over the texts, as BertTokenizer takes a single text; rows are padded to the longest possible."""
        zero, axis = g.const([0]), g.const([0])
        contrib = g.domain(DOMAIN, 1)
        growth = max(len(text.replace(" ", "")) for text in self._replacements.values())
        most = g.op.ReduceMax(
            g.op.Concat(typed(contrib.StringLength(texts), ir.DataType.INT64), zero, axis=0), axis, keepdims=1
        )
        room = g.op.Add(g.op.Mul(most, g.const([growth])), g.const([self.fewest]))
        if max_length:
            room = g.op.Min(room, g.const([max_length]))

        def step(place: Any, going: Any) -> list[Any]:
            text = self._ready(g, g.op.Gather(texts, g.op.Unsqueeze(place, axis), axis=0))
            tokens = typed(contrib.BertTokenizer(text, _outputs=3, **self._attributes)[0], ir.DataType.INT64)
            if max_length:
                tokens = self._cut(g, tokens, max_length)
            length = g.op.Shape(tokens)
            row = g.op.Pad(tokens, g.op.Concat(zero, g.op.Sub(room, length), axis=0), g.const(0))
            return [going, row, length]

        graph = g.subgraph(step, [(torch.int64, ()), (torch.bool, ())], name="texts")
        count = g.op.Shape(texts)
        rows, lengths = g.op.Loop(g.op.Squeeze(count, axis), g.const(True), body=graph, _outputs=2)
        lengths = g.op.Reshape(
            lengths, g.op.Concat(count, g.const([1]), axis=0)
        )  # without texts the lengths have no second axis
        fewest = g.const([self.fewest])  # of no texts
        longest = g.op.ReduceMax(g.op.Concat(g.op.Reshape(lengths, count), fewest, axis=0), axis, keepdims=1)
        rows = g.op.Slice(g.op.Reshape(rows, g.op.Concat(count, room, axis=0)), zero, longest, g.const([1]))
        places = g.op.Range(g.const(0), g.op.Squeeze(longest, axis), g.const(1))
        return rows, g.cast(g.op.Less(places, lengths), torch.int64)

    def _ready(self, g: Any, text: Any) -> Any:
        """Clean text with spaces around each word; the unknown character alone stands for a word that has it."""
        contrib, off = g.domain(DOMAIN, 1), g.const([False])
        kept = sorted({" ", *self._characters, *self._places.values()} - {self._unknown})
        encoder = character_model(self._replacements, kept, self._unknown)
        decoder = character_model({"\n": " "}, kept, self._unknown)
        options = [g.const([0]), g.const([0.0]), off, off, off]
        numbers, _ = contrib.SentencepieceTokenizer(text, *options, model=encoder, _outputs=2)
        numbers = g.cast(typed(numbers, ir.DataType.INT32), torch.int64)
        clean = typed(contrib.SentencepieceDecoder(numbers, model=decoder), ir.DataType.STRING)
        return replaced(g, clean, rf"\S*{self._unknown}\S*", self._unknown)

    def _cut(self, g: Any, tokens: Any, max_length: int) -> Any:
        """The first ``max_length`` tokens; of a longer text the last becomes the token at the end of every text."""
        kept = g.op.Slice(tokens, [0], [max_length], [0])
        longer = g.op.Greater(g.op.Size(tokens), g.const(max_length))
        places = g.op.Range(g.const(0), g.op.Size(kept), g.const(1))
        ends = g.op.And(longer, g.op.Equal(places, g.const(max_length - 1)))
        return g.op.Where(ends, g.const(self.after[0]), kept)
