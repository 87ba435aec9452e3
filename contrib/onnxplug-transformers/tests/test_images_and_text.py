"""Gemma 3's folder of three files by onnxruntime-genai: transformers' own text, of images and without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session

og = pytest.importorskip("onnxruntime_genai")

STEPS = 14
IMAGE, BEGIN, END = 110, 111, 112
_ONE = [BEGIN, *[IMAGE] * 4, END]


@pytest.fixture(scope="module")
def both(with_images: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model, and its folder for onnxruntime-genai."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, folder = with_images("gemma3"), tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder / "gemma3")
    export = ["export", f"transformers:{folder / 'gemma3'}", "-o", str(folder / "onnx"), "--no-tokenizer", "--verify"]
    assert run(export) == 0
    model.generation_config.eos_token_id = None
    return model, folder / "onnx"


def continued(folder: Path, rows: list[list[int]], images: torch.Tensor | None) -> list[list[int]]:
    """The text that onnxruntime-genai writes."""
    model = og.Model(str(folder))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=len(rows[0]) + STEPS, batch_size=len(rows))
    generator = og.Generator(model, settings)
    if images is not None:
        generator.set_model_input("pixel_values", images.numpy())
        generator.set_model_input("num_image_tokens", np.array([4 * len(images)], dtype=np.int64))
    generator.append_tokens(np.array(rows, dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row)[len(rows[0]) :].tolist() for row in range(len(rows))]


def expected(
    model: Any, rows: list[list[int]], images: torch.Tensor | None, *, is_seen_whole: bool = True
) -> list[list[int]]:
    """The text that transformers writes; tokens of an image see the whole image, as by its processor's inputs."""
    tokens = torch.tensor(rows)
    kinds = (tokens == IMAGE).long() * is_seen_whole
    given = {} if images is None else {"pixel_values": images, "token_type_ids": kinds}
    with torch.no_grad():
        text = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=STEPS, do_sample=False, **given
        )
    return text[:, -STEPS:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("rows", "images"),
    [
        ([[5, *_ONE, 6, 7, *_ONE, 9, 10, 11]], 2),
        ([[5, *_ONE, 6, 7], [*_ONE, 8, 9, 10]], 2),
        ([[5, 6, 7, 8, 9, 10, 35, 21, 11]], 0),
    ],
    ids=["two images", "two rows", "no image"],
)
@pytest.mark.long
def test_text_is_that_of_transformers(rows: list[list[int]], images: int, both: tuple[Any, Path]) -> None:
    pixels = torch.randn(images, 3, 32, 32) if images else None
    text = expected(both[0], rows, pixels)
    assert len({token for row in text for token in row}) > 4
    assert continued(both[1], rows, pixels) == text
    if pixels is not None:
        assert expected(both[0], rows, -pixels) != text
        assert expected(both[0], rows, pixels, is_seen_whole=False) != text


def test_windows_shorter_than_images(with_images: Callable[[str], Any], tmp_path: Path) -> None:
    """Tokens of an image see its later tokens, and of the tokens before them a window."""
    model = with_images("gemma3")
    model.config.text_config.sliding_window = 3
    model.save_pretrained(tmp_path / "gemma3")
    assert run(["export", f"transformers:{tmp_path / 'gemma3'}", "-o", str(tmp_path / "onnx"), "--no-tokenizer"]) == 0
    vision, embedding, step = (
        inference_session(tmp_path / "onnx" / f"{name}.onnx") for name in ("vision", "embedding", "model")
    )
    for rows in ([[5, *_ONE, 6, 7, *_ONE, 9]], [[5, 6, *_ONE, 8, 9, 10], [*_ONE, 11, 12, 13, 14, 15]]):
        tokens = torch.tensor(rows)
        pixels = torch.randn(2, 3, 32, 32)
        (features,) = vision.run(None, {"pixel_values": pixels.numpy()})
        feed = {"input_ids": tokens.numpy()}
        (embedded,) = embedding.run(None, {**feed, "image_features": features})
        feed |= {"inputs_embeds": embedded, "attention_mask": np.ones(tokens.shape, np.int64)}
        for value in step.get_inputs():
            if value.name.startswith("past_key_values."):
                feed[value.name] = np.zeros((len(rows), value.shape[1], 0, value.shape[3]), np.float32)
        (logits,) = step.run(["logits"], feed)
        with torch.no_grad():
            exact = model(input_ids=tokens, pixel_values=pixels, token_type_ids=(tokens == IMAGE).long()).logits
        torch.testing.assert_close(torch.from_numpy(logits), exact)


def test_the_readme_shows_how(both: tuple[Any, Path], tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "DIR").symlink_to(both[1])
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "num_image_tokens" in block
    ]
    row, pixels = [5, *_ONE, 6, 7, 8], torch.randn(1, 3, 32, 32)
    tokens = np.array([row])
    shown: dict[str, Any] = {
        "given": {
            "input_ids": tokens,
            "pixel_values": pixels.numpy(),
        },
        "image_token": IMAGE,
    }
    exec(code, shown)
    text = shown["generator"].get_sequence(0).tolist()[len(row) :][:STEPS]
    assert [text] == expected(both[0], [row], pixels)


def test_bad_input(both: tuple[Any, Path], saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    source = both[1].with_name("gemma3")
    for options, message in (
        (["--for", "optimum"], "gemma3 for image-text-to-text is for --for genai, and not for optimum"),
        (["--int4"], "--int4 is for text generation"),
    ):
        assert run(["export", f"transformers:{source}", "-o", str(tmp_path / "onnx"), *options, "--no-tokenizer"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    from transformers import LlavaConfig

    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    )
    (tmp_path / "llava").mkdir()
    about = {**config.to_dict(), "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "llava" / "config.json").write_text(json.dumps(about))
    export = [
        "export",
        f"transformers:{tmp_path / 'llava'}",
        "-o",
        str(tmp_path / "onnx"),
        "--random",
        "--no-tokenizer",
    ]
    assert run(export) == 2
    message = (
        "models of images and text are taken of gemma3, idefics3, smolvlm, qwen2_vl, qwen2_5_vl, and this is llava"
    )
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "onnx").exists()
