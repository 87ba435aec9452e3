"""``onnxplug export transformers:FOLDER --with-processor`` of a language model: prompts in, and transformers' text out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime_extensions", reason="`make packages` tests with it, in an environment of its own")
pytest.importorskip("onnxplug_transformers")

import made
import numpy as np
import torch
import transformers

import onnxplug
from onnxplug.cli.app import run

PROMPTS = (["the cat sat on the mat", "hello"], ["the dogs"], ["a", "hello world, don't", "over 日本"])
_STD = 0.15  # of weights: at this width texts are various
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "gpt2": (
        made.gpt2,
        "GPT2",
        {"n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False},
    ),
    "llama": (
        made.llama,
        "Llama",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
        },
    ),
    "bloom": (made.gpt2, "Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False}),
}


def saved(folder: Path, name: str) -> Path:
    """A language model with random weights and its tokenizer."""
    make, kind, about = MODELS[name]
    tokenizer = make()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), initializer_range=_STD, **about)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change(folder: Path, **settings: Any) -> None:
    """Changes settings of generation."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def exported(folder: Path, *options: str) -> Path:
    output = folder.with_name("out" + "".join(options))
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--with-processor", *options]) == 0
    return output


def written(output: Path, texts: list[str], count: int) -> list[str]:
    session = onnxplug.runtime.inference_session(str(output / "model.onnx"))
    feed = {"texts": np.array(texts, dtype=object), "max_new_tokens": np.array(count)}
    return session.run(["generated_text"], feed)[0].tolist()  # type: ignore[no-any-return]


def expected(folder: Path, texts: list[str], count: int) -> list[str]:
    """transformers' texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.bos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        tokens = model.generate(**given, max_new_tokens=count, do_sample=False)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "options"), [("gpt2", ["--verify"]), ("llama", []), ("llama", ["--fused", "--verify"]), ("bloom", [])]
)
def test_prompts(name: str, options: list[str], tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", name)
    output = exported(folder, *options)
    for count in (1, 12):
        for texts in PROMPTS:
            text = written(output, texts, count)
            assert text == expected(folder, texts, count)
            assert all(row.startswith(start) and row != start for row, start in zip(text, texts, strict=True))


def test_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(saved(tmp_path / "in", "gpt2"))
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[2]
    names = {"onnxplug": onnxplug, "np": np}
    exec(block.replace("session.run", "(result,) = session.run"), names)
    assert names["result"].tolist() == expected(tmp_path / "in", ["Once upon a time", "The"], 40)


def test_texts_end_each_for_itself(tmp_path: Path) -> None:
    """A text ends at any of the tokens that the settings of generation name; padding follows."""
    folder = saved(tmp_path / "in", "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (first, second) = (expected(folder, [text], 6)[0][len(text) :] for text in PROMPTS[0])
    ends = [tokenizer(first, add_special_tokens=False)["input_ids"][1], tokenizer.convert_tokens_to_ids(second[-1])]
    change(folder, eos_token_id=ends, pad_token_id=tokenizer.convert_tokens_to_ids("</s>"), do_sample=True)
    output = exported(folder)
    whole, short = written(output, PROMPTS[0], 12), written(output, PROMPTS[0], 1)
    assert whole == expected(folder, PROMPTS[0], 12)
    assert short == expected(folder, PROMPTS[0], 1)
    assert len(whole[0]) < len(PROMPTS[0][0] + first)


def test_weights_of_four_bits(tmp_path: Path) -> None:
    """The text equals the steps of the exported decoder with weights of four bits."""
    folder = saved(tmp_path / "in", "gpt2")
    options = ["--int4", "--accuracy-level", "1"]
    output, plain = exported(folder, *options), tmp_path / "decoder"
    assert run(["export", f"transformers:{folder}", "-o", str(plain), *options]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    decoder = onnxplug.runtime.inference_session(str(plain / "model.onnx"))
    outputs = [value.name for value in decoder.get_outputs()]
    for text in PROMPTS[0]:
        ids = np.array([tokenizer(text)["input_ids"]])
        empty = {
            value.name: np.zeros((1, 4, 0, 8), np.float32) for value in decoder.get_inputs() if "past" in value.name
        }
        for _ in range(8):
            feed = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(ids.shape[1])[None],
            }
            logits = dict(zip(outputs, decoder.run(None, {**feed, **empty}), strict=True))["logits"]
            ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], 1)
        assert written(output, [text], 8) == tokenizer.batch_decode(ids)


def test_texts_without_tokens(tmp_path: Path) -> None:
    """Texts without tokens stay as they are, and change no other text."""
    folder = saved(tmp_path / "in", "gpt2")
    output = exported(folder)
    text = expected(folder, ["hello"], 5)
    assert written(output, ["", "hello"], 5) == ["", *text]
    assert written(output, [""], 5) == [""]
    assert written(output, [], 5) == []


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (["--static", "32,8"], {}, "--with-processor and --static exclude one another"),
        (["--last-logits"], {}, "--with-processor and --last-logits exclude one another"),
        (["--for", "optimum"], {}, "without --for"),
        ([], {"repetition_penalty": 1.3}, "the settings of generation have repetition_penalty: 1.3"),
        ([], {"suppress_tokens": [5]}, "the settings of generation have suppress_tokens: [5]"),
    ],
)
def test_what_is_refused(
    options: list[str], settings: dict[str, Any], message: str, tmp_path: Path, capsys: Any
) -> None:
    folder = saved(tmp_path / "in", "gpt2")
    change(folder, **settings)
    assert run(["export", f"transformers:{folder}", "-o", str(tmp_path / "out"), "--with-processor", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_other_ways_to_choose_are_said(tmp_path: Path, capsys: Any) -> None:
    folder = saved(tmp_path / "in", "gpt2")
    change(folder, do_sample=True, num_beams=3)
    exported(folder)
    assert "each step takes the best token, and not do_sample or num_beams 3" in capsys.readouterr().err
