"""Tokenizers of byte pairs: GPT-2's and RoBERTa's by the operator GPT2Tokenizer, CLIP's by CLIPTokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxplug_extensions import DOMAIN
from onnxplug_extensions.parts import About, TransformersEncoder, added, framed, refuse, sequence, typed

_SPACE = r"[\s\v\p{Z}\x{85}]+"
#: How CLIP's texts are normalised and split.
_NORMALISED = [
    {"type": "NFC"},
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Lowercase"},
]
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_END = "</w>"
#: Patterns of text that CLIPTokenizer splits otherwise than CLIP, and the text that it gets instead.
_CLEANED = (
    (r"(?i)<\|(startoftext|endoftext)\|>", r"<| \1 |> "),
    (r"(\p{N})", r" \1 "),
    (_SPACE, " "),
    *2
    * (
        (r"([\p{L}\p{N}]) ('(?i:s|t|re|ve|m|ll|d))", r"\1\2"),
    ),  # twice, as a match takes the letter that the next match would need
)
#: The letter that stands for the first special token in CLIP's texts, the last letter that NFC replaces; others follow
#: downwards.
_LAST = 0x2FA1D


class GPT2(TransformersEncoder):
    """A tokenizer like GPT-2's, with or without tokens before and after a text.

    Raises:
        UsageError: It differs from GPT-2's in a way that GPT2Tokenizer has no attribute for.
    """

    def __init__(self, tokenizer: Any, about: About) -> None:
        super().__init__(tokenizer, about)
        model, tokens = about["model"], added(about)
        refuse(about["normalizer"] is not None, "it normalises text")
        split: Mapping[str, Any] = about["pre_tokenizer"] or {"type": None}
        refuse(split["type"] != "ByteLevel" or not split["use_regex"], "it does not split as GPT-2 does")
        refuse(split["add_prefix_space"], "it adds a space before a text")
        refuse(
            bool(model["end_of_word_suffix"] or model["continuing_subword_prefix"]), "pieces are marked by their place"
        )
        refuse(
            bool(model["dropout"] or model["byte_fallback"]), "it drops merges, or has bytes for what it does not know"
        )
        refuse(bool(model.get("ignore_merges")), "it takes whole words before it looks at merges")
        from tokenizers.pre_tokenizers import ByteLevel

        refuse(not set(ByteLevel.alphabet()) <= model["vocab"].keys(), "its vocabulary lacks a byte")
        _refuse_whole_words(tokens)
        refuse(any("=" in content or "\n" in content for content in tokens), "an added token has '=' or a line end")
        self._added = tokens
        self._attributes = {
            "vocab": json.dumps(model["vocab"], ensure_ascii=False),
            "merges": "\n".join(_merges(model)),
            "added_token": "\n".join(f"{content}={token['id']}" for content, token in tokens.items()),
            "padding_length": -1,
        }

    def emit(self, g: Any, texts: Any, max_length: int) -> tuple[Any, Any]:
        """GPT2Tokenizer of all texts; the tokens before and after a text are added to its result."""
        results = g.domain(DOMAIN, 1).GPT2Tokenizer(self._stripped(g, texts), _outputs=2, **self._attributes)
        tokens, mask = (typed(value, ir.DataType.INT64, 2) for value in results)
        return framed(g, tokens, mask, max_length, self.before, self.after)

    def _stripped(self, g: Any, texts: Any) -> Any:
        """Texts without the spaces beside added tokens that strip them."""
        for content, token in self._added.items():
            if token["lstrip"] or token["rstrip"]:
                before, after = (_SPACE[:-1] + "*" if token[side] else "" for side in ("lstrip", "rstrip"))
                texts = replaced(g, texts, before + re.escape(content) + after, content.replace("\\", "\\\\"))
        return texts


class CLIP(TransformersEncoder):
    """CLIP's tokenizer, which marks the last piece of a word.

    CLIPTokenizer of a text with a special token ends the process: a word of one letter that no normalised text has
    stands for each special token. It takes several digits for one word, and spaces other than U+0020 for letters: both
    are replaced before it.

    Raises:
        UsageError: It differs from CLIP's.
    """

    def __init__(self, tokenizer: Any, about: About) -> None:
        super().__init__(tokenizer, about)
        model, tokens, split = about["model"], added(about), sequence(about["pre_tokenizer"])
        refuse(sequence(about["normalizer"]) != _NORMALISED, "it does not normalise as CLIP does")
        words = len(split) == 2 and split[0]["type"] == "Split" and split[0]["pattern"] == {"Regex": _WORDS}
        refuse(not words or split[1]["type"] != "ByteLevel", "it does not split as CLIP does")
        refuse(
            model["end_of_word_suffix"] != _END or bool(model["continuing_subword_prefix"]), "it marks words otherwise"
        )
        refuse(bool(model["dropout"] or model.get("ignore_merges")), "it drops merges, or takes whole words before")
        refuse(any(token["lstrip"] or token["rstrip"] for token in tokens.values()), "an added token takes in spaces")
        _refuse_whole_words(tokens)
        refuse(len(self.before) != 1 or len(self.after) != 1, "it puts no single token before and after a text")
        vocabulary, merges = dict(model["vocab"]), _merges(model)
        refuse(not {"<|startoftext|>", "<|endoftext|>"} <= vocabulary.keys(), "its vocabulary lacks CLIP's own tokens")
        from tokenizers.pre_tokenizers import ByteLevel

        every = {byte + end for byte in ByteLevel.alphabet() for end in ("", _END)}
        refuse(not every <= vocabulary.keys(), "its vocabulary lacks a byte")
        self._words = {content: chr(_LAST - place) for place, content in enumerate(tokens)}
        for content, word in self._words.items():
            splitter = ByteLevel(add_prefix_space=False, use_regex=False)
            first, *rest = list(splitter.pre_tokenize_str(word)[0][0])
            for piece in (*rest[:-1], rest[-1] + _END):
                merges.append(f"{first} {piece}")
                first += piece
                vocabulary.setdefault(first, len(vocabulary))
            vocabulary[first] = tokens[content]["id"]
        self._attributes = {
            "vocab": json.dumps(vocabulary, ensure_ascii=False),
            "merges": "\n".join(dict.fromkeys(merges)),
            "padding_length": -1,
        }

    def emit(self, g: Any, texts: Any, max_length: int) -> tuple[Any, Any]:
        """CLIPTokenizer of all texts; the tokenizer's tokens of the beginning and the end replace the operator's."""
        for content, word in self._words.items():
            texts = replaced(g, texts, re.escape(content), f" {word} ")
        for pattern, rewrite in _CLEANED:
            texts = replaced(g, texts, pattern, rewrite)
        results = g.domain(DOMAIN, 1).CLIPTokenizer(texts, _outputs=2, **self._attributes)
        tokens, mask = (typed(value, ir.DataType.INT64, 2) for value in results)
        tokens, mask = g.op.Slice(tokens, [1], [-1], [1]), g.op.Slice(mask, [2], [2**62], [1])
        return framed(g, tokens, mask, max_length, self.before, self.after)


def _refuse_whole_words(tokens: Mapping[str, Mapping[str, Any]]) -> None:
    refuse(any(token["single_word"] for token in tokens.values()), "an added token counts as a whole word only")


def _merges(model: Mapping[str, Any]) -> list[str]:
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def replaced(g: Any, texts: Any, pattern: str, rewrite: str, once: bool = False) -> Any:
    """Texts with all matches of a pattern of RE2 replaced, or with ``once`` the first match."""
    attributes = {"global_replace": 0} if once else {}
    result = g.domain(DOMAIN, 1).StringRegexReplace(texts, g.const([pattern]), g.const([rewrite]), **attributes)
    return typed(result, ir.DataType.STRING)
