"""Whisper's folder by onnxruntime-genai: transformers' own text, also where tokens are suppressed, and its spectrogram of a sound file."""

from __future__ import annotations

import json
import re
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxplug.cli.app import run

og = pytest.importorskip("onnxruntime_genai")

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "spectrograms": ({"rtol": 0, "atol": 1e-3}, "logarithms of sums of float32 in another order; the range is 2"),
}
STEPS, START = 16, [2, 7]


def model_of(**settings: Any) -> Any:
    """A small Whisper for the length of sound that onnxruntime-genai gives it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=100,
        tie_word_embeddings=False,
        num_mel_bins=80,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_target_positions=220,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
        init_std=0.4,
        **settings,
    )
    model: Any = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[:3] = 0  # never among the best
    return model


def export(model: Any, folder: Path, *options: str) -> Path:
    model.save_pretrained(folder)
    about = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": 16000}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    output = folder.with_name("onnx")
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--verify", *options]) == 0
    return output


def continued(folder: Path, sound: torch.Tensor, **search: Any) -> list[list[int]]:
    """The text that onnxruntime-genai writes."""
    model, batch = og.Model(str(folder)), len(sound)
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=len(START) + STEPS, batch_size=batch, **search)
    generator = og.Generator(model, settings)
    generator.set_model_input("input_features", sound.numpy())
    generator.append_tokens(np.array([START] * batch, dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row)[len(START) :].tolist() for row in range(batch)]


def expected(
    model: Any, sound: torch.Tensor, start: Sequence[Sequence[int]] | None = None, **search: Any
) -> list[list[int]]:
    """The text that transformers writes."""
    with torch.no_grad():
        text = model.generate(
            input_features=sound,
            decoder_input_ids=torch.tensor(start or [START] * len(sound)),
            max_new_tokens=STEPS,
            do_sample=False,
            **search,
        )
    return text[:, -STEPS:].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def plain(tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> tuple[Any, Path]:
    """A model and its folder for onnxruntime-genai."""
    (tmp_path / "whisper").mkdir()
    save_tokenizer(tmp_path / "whisper")
    model = model_of(begin_suppress_tokens=None)
    return model, export(model, tmp_path / "whisper")


def without_end(model: Any) -> Any:
    """The model, whose texts don't end: their last token is never drawn."""
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.long
@pytest.mark.parametrize("beams", [1, 3])
def test_text_is_that_of_transformers(beams: int, plain: tuple[Any, Path]) -> None:
    model, output = without_end(plain[0]), plain[1]
    for batch in (1, 3):
        sound = torch.randn(batch, 80, 3000)
        text = expected(model, sound, num_beams=beams)
        assert len({token for row in text for token in row}) > 4
        assert continued(output, sound, num_beams=beams) == text


@pytest.mark.long
def test_suppressed_tokens(tmp_path: Path) -> None:
    """Some tokens are never written, some never as the first token."""
    sound = torch.randn(2, 80, 3000)
    free = expected(without_end(model_of(begin_suppress_tokens=None)), sound, num_beams=1)
    always = free[0][1:3]
    first = sorted({token for row in free for token in row} - {*always})
    assert free[1][0] in first
    model = model_of(begin_suppress_tokens=first, suppress_tokens=always)
    output = export(model, tmp_path / "whisper")
    text = expected(without_end(model), sound, num_beams=1)
    assert {*first} & {token for row in text for token in row}
    assert continued(output, sound) == text


@pytest.mark.long
def test_a_sound_file(plain: tuple[Any, Path], tmp_path: Path, monkeypatch: Any) -> None:
    """From the file's bytes to text, by the README's code; the spectrogram is transformers' own."""
    from transformers import WhisperFeatureExtractor

    model = og.Model(str(plain[1]))
    processor = model.create_multimodal_processor()
    seconds = np.arange(3 * 16000) / 16000
    sound = 0.4 * np.sin(2 * np.pi * 440 * seconds**2) + 0.05 * np.random.default_rng(0).standard_normal(len(seconds))
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())
    inputs = processor(["ab"], audios=og.Audios.open(str(tmp_path / "sound.wav")))
    found = torch.tensor(inputs["audio_features"].as_numpy())
    samples = (sound.clip(-1, 1) * 32767).astype("<i2") / 32768
    exact = WhisperFeatureExtractor()(samples, sampling_rate=16000, return_tensors="pt").input_features
    for frames in (slice(2, 300), slice(302, None)):  # onnxruntime-genai pads the ends of the sound otherwise
        torch.testing.assert_close(found[:, :, frames], exact[:, :, frames], **LOOSER["spectrograms"][0])
    page = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "sound.wav" in block]
    plain[1].rename(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)  # a tokenizer of letters makes the prompt longer
    start = names["inputs"]["input_ids"].as_numpy().tolist()
    text = names["generator"].get_sequence(0)[len(start[0]) :].tolist()
    assert len(text) > STEPS
    assert [text[:STEPS]] == expected(without_end(plain[0]), found, start, num_beams=1)
