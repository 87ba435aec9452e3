"""Tokenizers by onnxruntime-extensions, compared with transformers' own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("onnxruntime_extensions", reason="`make packages` tests with it, in an environment of its own")

import made
import torch
import transformers
from lines import thousand_lines
from made import wordpiece
from onnxplug_extensions import Detokenizer, Tokenizer
from tokenizers import Tokenizer as Backend

import onnxplug
from onnxplug import string_array, string_tensor

TEXTS = ["the cat sat on the mat", "", "Unaffable Ñandú, 猫!", "a [MASK] and [SEP]", "안녕 क्ष ΣΑΣ 😀 x" + "y" * 120]
MORE = ["dogs", "\t", "the the the the the the the the the the", "İstanbul ok✅ no\x07bell |pipe|", "ок я " + "я" * 99]


@pytest.mark.onnxplug("extensions")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


@pytest.mark.parametrize(
    ("options", "max_length"),
    [({}, None), ({"lower": False}, 6), ({"accents": False}, 3), ({"chinese": False}, None)],
)
def test_wordpiece(onnx_check: Callable[..., Any], options: dict[str, Any], max_length: int | None) -> None:
    module = Tokenizer(wordpiece(**options), max_length)
    onnx_check(
        module,
        (string_tensor(TEXTS),),
        dynamic_shapes=({0: "texts"},),
        inputs=[(string_tensor(MORE),), (string_tensor([""]),), (string_tensor(TEXTS[2:3]),)],
        opsets=(21,),
        optimize=(True,),
        seeds=(),
    )


@pytest.mark.parametrize("name", ["gpt2", "roberta", "clip", "llama"])
def test_byte_pairs(onnx_check: Callable[..., Any], name: str) -> None:
    tokenizer = getattr(made, name)()
    onnx_check(
        Tokenizer(tokenizer, max_length=9),
        (string_tensor(TEXTS),),
        dynamic_shapes=({0: "texts"},),
        inputs=[(string_tensor(MORE),), (string_tensor(["a cat", "  <mask> sat"]),)],
        opsets=(18, 21),
        optimize=(True,),
        seeds=(),
    )


#: Lines of the thousand whose tokens differ in the library, as README says.
DIFFERENT = {"gpt2": [], "roberta": ["<|endoftext|> <|startoftext|>"], "clip": [], "llama": []}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_thousand_lines(name: str) -> None:
    module, lines = Tokenizer(getattr(made, name)()), string_tensor(thousand_lines())
    program = onnxplug.to_onnx(module, (lines[:3],), dynamic_shapes=({0: "texts"},))
    ids, mask = module(lines).values()
    got, got_mask = program(lines)
    assert got.shape == ids.shape
    same = (torch.where(mask.bool(), ids, 0) == torch.where(got_mask.bool(), got, 0)).all(1) & (mask == got_mask).all(1)
    assert string_array(lines)[~same.numpy()].tolist() == DIFFERENT[name]


def test_clip_without_crashes() -> None:
    """Special tokens, which end the process where CLIPTokenizer itself sees them, contractions and digits; cut to 8 tokens too."""
    texts = [
        "a<|startoftext|>b",
        "<|STARTOFTEXT|> <|endoftext|>'s",
        "it 's 2024, isn 'T it",
        "x\x0b\u3000y 10",
        "'ll 've",
    ]
    tokenizer = made.clip()
    for max_length in (None, 8):
        module = Tokenizer(tokenizer, max_length)
        program = onnxplug.to_onnx(module, (string_tensor(texts),), dynamic_shapes=({0: "texts"},))
        for some in (texts, texts[3:4], [text[::-1] for text in texts]):
            for got, wanted in zip(program(string_tensor(some)), module(string_tensor(some)).values(), strict=True):
                torch.testing.assert_close(got, wanted)


def test_differences_of_clip() -> None:
    """The differences that README lists still exist; otherwise README is to be changed."""
    module = Tokenizer(made.clip())
    texts = string_tensor(["e\u0301", "! 's", "a\0b"])
    program = onnxplug.to_onnx(module, (texts,), dynamic_shapes=({0: "texts"},))
    for n in range(3):
        wanted, got = module(texts[n : n + 1])["input_ids"], program(texts[n : n + 1])[0]
        assert got.tolist() != wanted.tolist()


@pytest.mark.parametrize("max_length", [None, 5])
@pytest.mark.parametrize(
    ("make", "fewest"), [(wordpiece, 2), (made.gpt2, 0), (made.roberta, 2), (made.clip, 2), (made.llama, 0)]
)
def test_no_texts(make: Callable[[], Any], fewest: int, max_length: int | None) -> None:
    """As many columns as every text has, in PyTorch too: torch's guards rely on it."""
    module = Tokenizer(make(), max_length)
    program = onnxplug.to_onnx(module, (string_tensor(TEXTS),), dynamic_shapes=({0: "texts"},))
    for results in (program(string_tensor([])), module(string_tensor([])).values()):
        assert {tuple(result.shape) for result in results} == {(0, fewest)}


def changed(tokenizer: Any, **settings: Any) -> Any:
    """A tokenizer with another part in its tokenizer.json."""
    import json

    about = json.loads(tokenizer.backend_tokenizer.to_str())
    for name, value in settings.items():
        about[name] = {**about[name], **value} if isinstance(value, dict) else value
    backend = Backend.from_str(json.dumps(about))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": {"type": "WordLevel"}}, "its model is WordLevel"),
        ({"normalizer": {"clean_text": False}}, "it keeps control characters"),
        ({"normalizer": None}, "its normalizer is not BERT's"),
        ({"pre_tokenizer": None}, "it does not split as BERT does"),
        ({"model": {"max_input_chars_per_word": 10}}, "the greatest length of a word is not 100"),
    ],
)
def test_tokenizers_that_no_operator_can_do(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=f"has no operator for this tokenizer: {reason}"):
        Tokenizer(changed(wordpiece(), **settings))


def test_added_words_are_refused() -> None:
    tokenizer = wordpiece()
    tokenizer.add_tokens(["dog"])
    with pytest.raises(onnxplug.UsageError, match="it has added tokens"):
        Tokenizer(tokenizer)


def test_other_errors() -> None:
    with pytest.raises(onnxplug.UsageError, match="str is no tokenizer of transformers"):
        Tokenizer("bert")
    tokenizer = wordpiece()
    tokenizer.padding_side = "left"
    with pytest.raises(onnxplug.UsageError, match="pads and cuts at the end"):
        Tokenizer(tokenizer)
    for least, make in ((2, wordpiece), (0, wordpiece), (-1, made.gpt2), (0, made.gpt2)):
        with pytest.raises(onnxplug.UsageError, match=f"max_length={least} leaves no token of the text"):
            Tokenizer(make(), max_length=least)


@pytest.mark.parametrize("make", [Tokenizer, Detokenizer])
def test_a_module_works_while_an_equal_one_comes_and_goes(make: Callable[..., Any]) -> None:
    module = make(made.gpt2())
    inputs = string_tensor(TEXTS) if make is Tokenizer else torch.tensor([[9, 40, 300], [7, 8, 0]])
    wanted = module(inputs)
    make(made.gpt2())
    gc.collect()
    again = copy.deepcopy(module)
    before = module(inputs)
    del module
    gc.collect()
    for result in (before, again(inputs)):
        if make is Tokenizer:
            assert result["input_ids"].equal(wanted["input_ids"])
        else:
            assert string_array(result).tolist() == string_array(wanted).tolist()


@pytest.mark.parametrize(
    ("version", "message"), [(None, "and it is not installed"), ("0.12.0", r"and 0\.12\.0 is installed")]
)
def test_the_library_is_absent_or_another(monkeypatch: pytest.MonkeyPatch, version: str | None, message: str) -> None:
    from importlib import metadata

    from onnxplug_extensions import library

    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    library.check_library.cache_clear()
    module = Tokenizer(wordpiece())
    try:
        with pytest.raises(onnxplug.OnnxplugError, match=message):
            onnxplug.to_onnx(module, (string_tensor(TEXTS),), dynamic_shapes=({0: "texts"},))
    finally:
        library.check_library.cache_clear()
