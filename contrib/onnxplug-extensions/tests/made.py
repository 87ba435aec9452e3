"""Small tokenizers of transformers' own classes, made of a few lines of text."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog's back. don't you'll we've 123 4567 ünïcödé déjà vu",
    "日本語のテキスト Привет мир مرحبا नमस्ते 안녕하세요 😀 สวัสดี the cats sat on the mat and the dogs ran",
]


def wordpiece(lower: bool = True, accents: bool | None = None, chinese: bool = True) -> Any:
    """A tokenizer like BERT's."""
    letters = "abcdefghijklmnopqrstuvwxyzñúяок猫ᄋ,!|ा"
    pieces = [*letters, *(f"##{letter}" for letter in letters), "the", "cat", "##at", "un", "##aff", "##able", "İ", "S"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return transformers.BertTokenizer(
        vocab=vocabulary, do_lower_case=lower, strip_accents=accents, tokenize_chinese_chars=chinese
    )


def _trained(special: list[str], split: Any = None, bytes_too: bool = True) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()} if bytes_too else {}
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, **options)
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend


def _parts(backend: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    import json

    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def gpt2() -> Any:
    """A tokenizer like GPT-2's."""
    vocabulary, merges = _parts(_trained(["<|endoftext|>"]))
    return transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)


def roberta() -> Any:
    """A tokenizer like RoBERTa's, whose mask token strips the spaces before it."""
    vocabulary, merges = _parts(_trained(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]))
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=merges)


def clip() -> Any:
    """A tokenizer like CLIP's, which marks the last piece of a word."""
    own, end = ("<|startoftext|>", "<|endoftext|>"), "</w>"
    parts = transformers.CLIPTokenizer(vocab={name: n for n, name in enumerate(own)}, merges=[]).backend_tokenizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(end_of_word_suffix=end))
    backend.normalizer, backend.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1100, show_progress=False, initial_alphabet=letters, end_of_word_suffix=end
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    _, merges = _parts(backend)
    words = dict.fromkeys([*letters, *(letter + end for letter in letters), *map("".join, merges), *own])
    return transformers.CLIPTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=merges)


def llama() -> Any:
    """A tokenizer like Llama's: any two pieces that make a piece are a merge, as transformers derives them."""
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary, _ = _parts(_trained(special, split=words, bytes_too=False))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in vocabulary
        if piece not in special
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return transformers.LlamaTokenizer(vocab=vocabulary, merges=merges, padding_side="right")
