"""SmolVLM, Idefics3 and Qwen's models of images, by onnxruntime-genai: transformers' own text, of images of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxplug.cli.app import run

og = pytest.importorskip("onnxruntime_genai")

STEPS, IMAGE, START, END = 12, 110, 112, 113
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
    """What onnxruntime-genai and transformers write."""
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
    found = [generator.get_sequence(row)[len(rows[0]) :].tolist() for row in range(len(rows))]
    if "image_grid_thw" in images:
        images["mm_token_type_ids"] = (tokens == IMAGE).int()
    with torch.no_grad():
        text = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=STEPS, do_sample=False, **images
        )
    return found, text[:, -STEPS:].tolist()


def patches(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Images of Qwen's models, by rows and columns of patches."""
    count = sum(h * w for h, w in sizes)
    return {"pixel_values": torch.randn(count, 96), "image_grid_thw": torch.tensor([(1, h, w) for h, w in sizes])}


def of_image(tokens: int) -> list[int]:
    return [START, *[IMAGE] * tokens, END]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_vl"])
def test_patches(kind: str, both: Export) -> None:
    exported, seen = both(kind), []
    for rows, sizes in (
        ([[5, *of_image(6), 6, 7, 8]], [(4, 6)]),
        ([[5, *of_image(15), 6, 7, *of_image(2), 9, 10]], [(6, 10), (2, 4)]),
        ([[5, *of_image(6), 6, 7], [*of_image(6), 8, 9, 10]], [(4, 6), (6, 4)]),
        ([[5, 6, 7, 8, 9, 10, 35, 21, 11]], []),
    ):
        images = patches(*sizes) if sizes else {}
        found, expected = texts(exported, rows, **images)
        assert found == expected
        assert len({token for row in found for token in row}) > 4
        seen.append(found)
        if images:
            other = {**images, "pixel_values": -images["pixel_values"]}
            assert texts(exported, rows, **other)[1] != expected
    assert seen[0] != seen[1][:1]


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_tiles(kind: str, both: Export) -> None:
    exported = both(kind)
    one = [IMAGE] * 4
    for rows, tiles in (
        ([[5, *one, 6, 7, *one, 9, 10, 11]], [2]),
        ([[5, *one, 6, 7, 8, 9], [5, 20, 21, 6, 7, 8, 9, 22, 23], [*one, *one, 4]], [1, 0, 2]),
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
        found, expected = texts(exported, rows, **images)
        assert found == expected
        assert len({token for row in found for token in row}) > 4
        if images:
            other = {**images, "pixel_values": -images["pixel_values"]}
            assert texts(exported, rows, **other)[1] != expected
            whole = {**images, "pixel_attention_mask": images["pixel_values"].any(2).long()}
            whole["pixel_attention_mask"][0, 0] = 1
            assert texts(exported, rows, **whole)[1] != expected
