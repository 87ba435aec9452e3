"""SmolVLM, Idefics3 and Qwen's models of images, by onnxruntime-genai: transformers' own text, of images of several sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxplug.cli.app import run

og = pytest.importorskip("onnxruntime_genai")

STEPS, IMAGE, START, END = 12, 110, 112, 113
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 2000},
    "image_mean": [0.48, 0.45, 0.4],
    "image_std": [0.26, 0.27, 0.28],
}
Export = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def both(with_images: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A model by its kind, and its folder for onnxruntime-genai."""
    made: dict[str, tuple[Any, Path]] = {}

    def export(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model, folder = with_images(kind), tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder / "model")
            (folder / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
            target = folder / "onnx"
            assert (
                run(["export", f"transformers:{folder / 'model'}", "-o", str(target), "--no-tokenizer", "--verify"])
                == 0
            )
            model.generation_config.eos_token_id = None
            made[kind] = model, target
        return made[kind]

    return export


def texts(both: tuple[Any, Path], rows: list[list[int]], **images: torch.Tensor) -> tuple[Any, Any]:
    """The texts that onnxruntime-genai and transformers write."""
    model, folder = both
    loaded = og.Model(str(folder))
    settings = og.GeneratorParams(loaded)
    settings.set_search_options(max_length=len(rows[0]) + STEPS, batch_size=len(rows))
    generator = og.Generator(loaded, settings)
    tokens = torch.tensor(rows)
    for name, value in images.items():
        generator.set_model_input(name, value.numpy())
    if images:
        generator.set_model_input("num_image_tokens", np.array([int((tokens == IMAGE).sum())]))
    generator.append_tokens(np.array(rows, dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    written = [generator.get_sequence(row)[len(rows[0]) :].tolist() for row in range(len(rows))]
    if "image_grid_thw" in images:
        images["mm_token_type_ids"] = (tokens == IMAGE).int()
    with torch.no_grad():
        text = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=STEPS, do_sample=False, **images
        )
    return written, text[:, -STEPS:].tolist()


def patches(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Images of Qwen's models, by rows and columns of patches."""
    count = sum(h * w for h, w in sizes)
    return {"pixel_values": torch.randn(count, 96), "image_grid_thw": torch.tensor([(1, h, w) for h, w in sizes])}


def of_image(tokens: int) -> list[int]:
    return [START, *[IMAGE] * tokens, END]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.long)])
def test_patches(kind: str, both: Export) -> None:
    exported, seen = both(kind), []
    for rows, sizes in (
        ([[5, *of_image(6), 6, 7, 8]], [(4, 6)]),
        ([[5, *of_image(15), 6, 7, *of_image(2), 9, 10]], [(6, 10), (2, 4)]),
        ([[5, *of_image(6), 6, 7], [*of_image(6), 8, 9, 10]], [(4, 6), (6, 4)]),
        ([[5, 6, 7, 8, 9, 10, 35, 21, 11]], []),
    ):
        images = patches(*sizes) if sizes else {}
        written, expected = texts(exported, rows, **images)
        assert written == expected
        assert len({token for row in written for token in row}) > 4
        seen.append(written)
        if images:
            other = {**images, "pixel_values": -images["pixel_values"]}
            assert texts(exported, rows, **other)[1] != expected
    assert seen[0] != seen[1][:1]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("idefics3", marks=pytest.mark.long)])
def test_tiles(kind: str, both: Export) -> None:
    exported = both(kind)
    tile = [IMAGE] * 4
    for rows, tiles in (
        ([[5, *tile, 6, 7, *tile, 9, 10, 11]], [2]),
        ([[5, *tile, 6, 7, 8, 9], [5, 20, 21, 6, 7, 8, 9, 22, 23], [*tile, *tile, 4]], [1, 0, 2]),
        ([[5, 6, 7, 8, 9, 10, 35, 21, 11]], []),
    ):
        images = {}
        if tiles:
            images["pixel_values"] = torch.randn(len(tiles), max(tiles), 3, 32, 32)
            images["pixel_attention_mask"] = mask = torch.ones(len(tiles), max(tiles), 32, 32, dtype=torch.int64)
            mask[0, 0, 20:] = 0
            images["pixel_values"] *= mask[:, :, None]
            for row, count in enumerate(tiles):  # the rest is padding
                images["pixel_values"][row, count:], mask[row, count:] = 0, 0
        written, expected = texts(exported, rows, **images)
        assert written == expected
        assert len({token for row in written for token in row}) > 4
        if images:
            other = {**images, "pixel_values": -images["pixel_values"]}
            assert texts(exported, rows, **other)[1] != expected
            whole = {**images, "pixel_attention_mask": images["pixel_values"].any(2).long()}
            whole["pixel_attention_mask"][0, 0] = 1
            assert texts(exported, rows, **whole)[1] != expected


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of letters, and of the tokens of images by the model's numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(code): code - 33 + 3 for code in range(33, 127)}
    tokenizer = Tokenizer(models.BPE({"<pad>": 0, "<s>": 1, "</s>": 2, **letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    others = [f"<|{number}|>" for number in range(len(letters) + 3, IMAGE)]
    tokenizer.add_special_tokens([*others, "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def test_files_of_images(both: Export, tmp_path: Path) -> None:
    """onnxruntime-genai's processor gives the same result for a file as transformers' processor."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model, folder = both("qwen2_5_vl")
    write_tokenizer(folder)
    settings = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    prepared = Qwen2VLImageProcessorPil(**settings)
    loaded = og.Model(str(folder))
    processor = loaded.create_multimodal_processor()
    small = Image.fromarray(torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8).numpy())
    for number, size in enumerate([(44, 28), (24, 64), (90, 70)]):
        path = tmp_path / f"{number}.png"
        small.resize(size, Image.Resampling.BICUBIC).save(path)
        inputs = processor("ab<|vision_start|><|image_pad|><|vision_end|>cd", images=og.Images.open(str(path)))
        expected = prepared([Image.open(path)], return_tensors="pt")
        torch.testing.assert_close(torch.from_numpy(inputs["pixel_values"].as_numpy()), expected["pixel_values"])
        assert inputs["image_grid_thw"].as_numpy().tolist() == expected["image_grid_thw"].tolist()
        tokens = torch.from_numpy(inputs["input_ids"].as_numpy()).long()
        assert int((tokens == IMAGE).sum()) == int(expected["image_grid_thw"].prod()) // 4
        settings_of_text = og.GeneratorParams(loaded)
        settings_of_text.set_search_options(max_length=tokens.shape[1] + STEPS)
        generator = og.Generator(loaded, settings_of_text)
        generator.set_inputs(inputs)
        while not generator.is_done():
            generator.generate_next_token()
        kinds = (tokens == IMAGE).int()
        with torch.no_grad():
            text = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                mm_token_type_ids=kinds,
                max_new_tokens=STEPS,
                do_sample=False,
                **expected,
            )
        assert generator.get_sequence(0).tolist() == text[0].tolist()
