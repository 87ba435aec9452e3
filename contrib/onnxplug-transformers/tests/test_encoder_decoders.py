"""`onnxplug export transformers:FOLDER` for models with an encoder and a decoder: two files, and transformers' own text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from onnxplug.cli.app import run

STEPS = 16


def written(folder: Path, inputs: dict[str, torch.Tensor], start: list[int]) -> list[list[int]]:
    """Text by the two files alone: the encoder once, then the decoder token by token, greedily."""
    encoder, decoder = (onnxruntime.InferenceSession(folder / f"{n}_model.onnx") for n in ("encoder", "decoder"))
    names = [value.name for value in encoder.get_outputs()]
    given = {name: value.numpy() for name, value in inputs.items()}
    feed = dict(zip(names, encoder.run(names, given), strict=True))
    feed.pop("last_hidden_state", None)  # Whisper's, for onnxruntime-genai
    if "attention_mask" in given:
        feed["encoder_attention_mask"] = given["attention_mask"]
    batch = len(next(iter(given.values())))
    kind = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    for value in decoder.get_inputs():
        if ".decoder." in value.name:
            feed[value.name] = np.zeros((batch, value.shape[1], 0, value.shape[3]), kind[value.type])
    text = tokens = np.tile(np.array(start), (batch, 1))
    outputs = [value.name for value in decoder.get_outputs()]
    for _ in range(STEPS):
        results = dict(zip(outputs, decoder.run(outputs, {**feed, "input_ids": tokens}), strict=True))
        tokens = results.pop("logits")[:, -1:].argmax(-1)
        text = np.concatenate([text, tokens], 1)
        feed.update({name.replace("present", "past_key_values"): value for name, value in results.items()})
    return text.tolist()  # type: ignore[no-any-return]


def sources(name: str) -> dict[str, torch.Tensor]:
    """Texts of unequal length, or sound."""
    if name == "whisper":
        return {"input_features": torch.randn(3, 16, 40)}
    ids, mask = torch.randint(3, 100, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    ids[1, 4:] = mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["t5", *(pytest.param(n, marks=pytest.mark.long) for n in ("whisper", "bart"))])
def test_text_is_that_of_transformers(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    folder = saved(name)
    output = exported(folder, "--verify")
    loader = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    model: Any = loader.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    inputs = sources(name)
    start = [model.config.decoder_start_token_id, *([7] if name == "whisper" else [])]
    with torch.no_grad():
        text = model.generate(
            **inputs,
            decoder_input_ids=torch.tensor([start] * 3),
            max_new_tokens=STEPS,
            do_sample=False,
            num_beams=1,
        )
    rows = text[:, -STEPS:].tolist()
    assert len({token for row in rows for token in row}) > 4
    assert rows[0] != rows[1]
    assert [row[-STEPS:] for row in written(output, inputs, start)] == rows
    assert sorted(path.suffix for path in output.iterdir()).count(".onnx") == 2
    assert not (output / "genai_config.json").exists()
    assert (output / "generation_config.json").is_file()


@pytest.mark.long
def test_halves(saved: Callable[[str], Path], exported: Any) -> None:
    folder = saved("whisper")
    inputs = {name: value.half() for name, value in sources("whisper").items()}
    assert len(written(exported(folder, "--dtype", "float16"), inputs, [2, 7])[0]) == STEPS + 2


@pytest.mark.parametrize("flag", ["--last-logits", "--fused", "--int4"])
def test_options_of_decoders_alone(flag: str, saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    assert run(["export", f"transformers:{saved('t5')}", "-o", str(tmp_path / "onnx"), flag]) == 2
    assert f"{flag} is for text generation" in capsys.readouterr().err
