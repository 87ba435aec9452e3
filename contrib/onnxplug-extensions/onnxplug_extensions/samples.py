"""Inputs that the operators are tested with: tokenizers made of a few words. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import Any

from onnxplug import OpSample

_TEXTS = ["the cat sat", "", "CATS, and dogs!", "a third, with an 😀", "Ñandú 猫 ①"]
#: What samples stand for is kept as long as the process runs.
_kept: list[Any] = []


def samples() -> list[OpSample]:
    """One for each kind of tokenizer."""
    about: dict[str, Any] = {"dynamic_shapes": _ROWS, "others": (), "opsets": (18, 21)}
    return [OpSample("onnxplug_extensions::tokenize", lambda: _tokenize(_wordpiece), **about)]


#: Any number of texts; the other arguments are no tensors.
_ROWS = ({0: "texts"}, None, None, None)


def _tokenize(make: Any, max_length: int = 0) -> tuple[Any, ...]:
    from onnxplug import string_tensor
    from onnxplug_extensions.tokenizers import encoder_of

    encoder, name = encoder_of(make())
    _kept.append(encoder)
    return string_tensor(_TEXTS), name, max_length, 1


def _wordpiece() -> Any:
    from transformers import BertTokenizer

    pieces = [*"acdghnostu", *(f"##{letter}" for letter in "acdghnostu"), "the", "cat", "##s", ",", "!", "猫", "and"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})
