"""``onnxplug export transformers:FOLDER --with-processor``: strings in, and labels out, compared with transformers."""

from __future__ import annotations

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

TEXTS = ["the cat sat", "", "Unaffable dogs! " * 20]
LABELS = {0: "bad", 1: "neither", 2: "good 😀"}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}


def saved(folder: Path, kind: str, tokenizer: Any, config: Any, **about: Any) -> Any:
    """A model of transformers with random weights, in a folder with its tokenizer."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config(vocab_size=len(tokenizer), **SIZES, **about)).eval()
    model.save_pretrained(folder)
    tokenizer.model_max_length = 30
    tokenizer.save_pretrained(folder)
    return model


def ran(folder: Path, texts: list[str]) -> dict[str, Any]:
    session = onnxplug.runtime.inference_session(str(folder / "model.onnx"))
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"texts": np.array(texts, dtype=object)}), strict=True))


@pytest.mark.parametrize("name", ["wordpiece", "roberta"])
def test_classification(name: str, tmp_path: Path) -> None:
    tokenizer = getattr(made, name)()
    kind, config = {"wordpiece": ("Bert", transformers.BertConfig), "roberta": ("Roberta", transformers.RobertaConfig)}[
        name
    ]
    labels = {"id2label": LABELS, "label2id": {text: n for n, text in LABELS.items()}}
    model = saved(tmp_path / "in", f"{kind}ForSequenceClassification", tokenizer, config, **labels)
    status = run(
        ["export", f"transformers:{tmp_path / 'in'}", "-o", str(tmp_path / "out"), "--with-processor", "--verify"]
    )
    assert status == 0
    for texts in (TEXTS, TEXTS[:1], [text[::-1] for text in TEXTS]):
        with torch.no_grad():
            logits = model(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")).logits
        results = ran(tmp_path / "out", texts)
        torch.testing.assert_close(torch.from_numpy(results["logits"]), logits)
        assert results["label"].tolist() == [LABELS[n] for n in logits.argmax(-1).tolist()]


def test_states(tmp_path: Path) -> None:
    tokenizer = made.wordpiece()
    model = saved(tmp_path / "in", "BertModel", tokenizer, transformers.BertConfig)
    assert run(["export", f"transformers:{tmp_path / 'in'}", "-o", str(tmp_path / "out"), "--with-processor"]) == 0
    for texts in (TEXTS, TEXTS[2:]):
        with torch.no_grad():
            wanted = model(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")).last_hidden_state
        results = ran(tmp_path / "out", texts)
        torch.testing.assert_close(torch.from_numpy(results["last_hidden_state"]), wanted)
        assert "label" not in results


@pytest.mark.parametrize(
    ("kind", "about", "message"),
    [
        ("BartForConditionalGeneration", {"d_model": 32}, "is for text generation and for models of text or images"),
        ("Wav2Vec2Model", {}, "Wav2Vec2Model takes input_values"),
    ],
)
def test_models_of_other_kinds(kind: str, about: dict[str, Any], message: str, tmp_path: Path, capsys: Any) -> None:
    tokenizer = made.llama()
    config = getattr(transformers, {"B": "BartConfig", "W": "Wav2Vec2Config"}[kind[0]])
    saved(tmp_path / "in", kind, tokenizer, config, **about)
    assert run(["export", f"transformers:{tmp_path / 'in'}", "-o", str(tmp_path / "out"), "--with-processor"]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
