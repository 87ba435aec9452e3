"""Tokenizers of byte pairs, GPT-2's and RoBERTa's, by the operator GPT2Tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxplug_extensions import DOMAIN
from onnxplug_extensions.parts import About, TransformersEncoder, added, framed, refuse, typed

_SPACE = r"[\s\p{Z}\x{85}]+"


class GPT2(TransformersEncoder):
    """A tokenizer like GPT-2's, with tokens before and after a text or without.

    Raises:
        UsageError: It differs from GPT-2's in what GPT2Tokenizer can't be told.
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
        refuse(any(token["single_word"] for token in tokens.values()), "an added token counts as a whole word only")
        refuse(any("=" in content or "\n" in content for content in tokens), "an added token has '=' or a line end")
        merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
        self._added = tokens
        self._attributes = {
            "vocab": json.dumps(model["vocab"], ensure_ascii=False),
            "merges": "\n".join(merges),
            "added_token": "\n".join(f"{content}={token['id']}" for content, token in tokens.items()),
            "padding_length": -1,
        }

    def emit(self, g: Any, texts: Any, max_length: int) -> tuple[Any, Any]:
        """GPT2Tokenizer of all texts; the tokens before and after are put there."""
        results = g.domain(DOMAIN, 1).GPT2Tokenizer(self._stripped(g, texts), _outputs=2, **self._attributes)
        tokens, mask = (typed(value, ir.DataType.INT64, 2) for value in results)
        return framed(g, tokens, mask, max_length, self.before, self.after)

    def _stripped(self, g: Any, texts: Any) -> Any:
        """Texts without the spaces that added tokens take in on their sides."""
        for content, token in self._added.items():
            if token["lstrip"] or token["rstrip"]:
                before, after = (_SPACE[:-1] + "*" if token[side] else "" for side in ("lstrip", "rstrip"))
                texts = replaced(g, texts, before + re.escape(content) + after, content.replace("\\", "\\\\"))
        return texts


def replaced(g: Any, texts: Any, pattern: str, rewrite: str, once: bool = False) -> Any:
    """Texts in which what a pattern of RE2 finds, or finds first, is replaced."""
    attributes = {"global_replace": 0} if once else {}
    result = g.domain(DOMAIN, 1).StringRegexReplace(texts, g.const([pattern]), g.const([rewrite]), **attributes)
    return typed(result, ir.DataType.STRING)
