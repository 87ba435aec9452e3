"""Token numbers back to texts, and labels, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("onnxruntime_extensions", reason="`make packages` tests with it, in an environment of its own")

import made
import torch
from lines import thousand_lines
from made import wordpiece
from onnxplug_extensions import Detokenizer, Labels

import onnxplug
from onnxplug import string_array

#: The byte 0, which the library takes for the end of a piece.
NUL = ("<0x00>", "Ā")
MAKERS = {"wordpiece": wordpiece, "gpt2": made.gpt2, "roberta": made.roberta, "llama": made.llama}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_a_thousand_lines(name: str, skip: bool) -> None:
    """Rows with tokens of the beginning, the end and padding; one file for rows of any number and length."""
    tokenizer = MAKERS[name]()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = thousand_lines()
    rows = [torch.tensor(tokenizer(lines[n::10], padding=True)["input_ids"]) for n in range(10)]
    module = Detokenizer(tokenizer, skip_special_tokens=skip)
    program = onnxplug.to_onnx(module, (rows[0][:3],), dynamic_shapes=({0: "texts", 1: "length"},))
    for ids in (*rows, rows[1][:1], rows[2][:0], rows[3][:4, :0]):
        wanted = (
            []
            if not len(ids)
            else tokenizer.batch_decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        )
        assert list(string_array(module(ids))) == wanted
        assert list(program(ids)[0]) == wanted


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "roberta", "llama"])
def test_bytes_that_are_no_text(name: str, skip: bool) -> None:
    """Tokens in any order, as a model writes them: parts of characters are U+FFFD where transformers has U+FFFD."""
    tokenizer = MAKERS[name]()
    module, draw = Detokenizer(tokenizer, skip_special_tokens=skip), torch.Generator().manual_seed(0)
    zeros = [n for n, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if token in NUL]
    few = 260 if name == "llama" else 120  # the bytes are the first tokens
    program = onnxplug.to_onnx(module, (torch.arange(30).reshape(3, 10),), dynamic_shapes=({0: "texts", 1: "length"},))
    replaced = 0
    for shape, top in (((400, 9), few), ((200, 20), len(tokenizer)), ((1, 1), few), ((60, 60), few)):
        ids = torch.randint(0, top, shape, generator=draw)
        ids = ids.masked_fill(torch.isin(ids, torch.tensor(zeros)), 40)
        wanted = tokenizer.batch_decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert program(ids)[0].tolist() == list(string_array(module(ids))) == wanted
        replaced += sum("\ufffd" in text for text in wanted)
    assert replaced > 100


def test_tokens_that_are_parts_of_a_character() -> None:
    tokenizer = made.gpt2()
    ids = torch.tensor([tokenizer("né 𝓗")["input_ids"]])
    assert ids.shape[1] > 4
    program = onnxplug.to_onnx(Detokenizer(tokenizer), (ids,), dynamic_shapes=({1: "length"},))
    assert program(ids)[0].tolist() == ["né 𝓗"]
    assert program(ids[:, :-1])[0].tolist() == ["né \ufffd"]


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_of_no_tokens(name: str) -> None:
    """transformers has no text for numbers behind the last, and an error for negative ones: the mask of labels, -100."""
    tokenizer = MAKERS[name]()
    module = Detokenizer(tokenizer)
    program = onnxplug.to_onnx(module, (torch.tensor([[9, 10]]),), dynamic_shapes=({0: "texts", 1: "length"},))
    ids = torch.tensor([[20, len(tokenizer)], [len(tokenizer) + 7, 21], [2**32 - 1, 22]])
    assert program(ids)[0].tolist() == string_array(module(ids)).tolist() == [tokenizer.decode(n) for n in (20, 21, 22)]
    for negative in (-1, -100):
        with pytest.raises(OverflowError):
            module(torch.tensor([[40, negative]]))
        with pytest.raises(Exception, match=r"(?s)Gather.*out of.*bounds"):
            program(torch.tensor([[40, negative]]))


def test_a_class_that_leaves_tokens_out() -> None:
    import transformers
    from tokenizers import AddedToken

    backend = made.gpt2().backend_tokenizer
    vocabulary, merges = made._parts(backend)
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=merges)
    tokenizer.add_tokens([AddedToken(f"<|{n / 50:.2f}|>", special=False) for n in range(9)])
    program = onnxplug.to_onnx(Detokenizer(tokenizer), (torch.arange(8).reshape(1, 8),), dynamic_shapes=({0: "texts"},))
    first = len(tokenizer) - 9
    for ids in (
        torch.tensor([[first, 40, 300, first + 3, 41, 42, first + 8, 0]]),
        torch.arange(first - 7, first + 9).reshape(2, 8),
    ):
        assert program(ids)[0].tolist() == [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


@pytest.mark.parametrize("opset", [18, 21])
def test_labels(opset: int) -> None:
    labels = Labels(["negative", "neither", "positive 😀"])

    def model(x: torch.Tensor) -> torch.Tensor:
        return labels(x.argmax(-1))

    inputs = [torch.randn(4, 3), torch.randn(1, 3), torch.randn(0, 3)]
    program = onnxplug.to_onnx(model, (inputs[0],), dynamic_shapes=({0: "texts"},), opset_version=opset)
    for x in inputs:
        assert list(program(x)[0]) == list(string_array(model(x)))


@pytest.mark.parametrize("shape", [(), (2, 0), (0, 3), (3, 2)])
def test_labels_of_any_shape(shape: tuple[int, ...]) -> None:
    labels, index = Labels(["a", "b"]), torch.ones(shape, dtype=torch.int64)
    program = onnxplug.to_onnx(labels, (index,))
    assert labels(index).shape == program(index)[0].shape == shape


@pytest.mark.parametrize("names", [{0: "a", 1: "b"}, "ab", [0, 1], ["a", None]])
def test_labels_that_are_no_list_of_strings(names: Any) -> None:
    with pytest.raises(onnxplug.UsageError, match="names is a list of strings, got"):
        Labels(names)


def test_a_decoder_that_is_unknown() -> None:
    from tokenizers import decoders

    tokenizer: Any = made.gpt2()
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    with pytest.raises(onnxplug.UsageError, match="its decoder is CTC"):
        Detokenizer(tokenizer)
    with pytest.raises(onnxplug.UsageError, match=r"of its token '.*' alone transformers makes"):
        Detokenizer(made.clip())  # its class takes out the marks of the ends of words
