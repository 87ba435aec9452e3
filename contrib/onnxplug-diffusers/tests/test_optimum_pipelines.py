"""Folders of pipelines, loaded by optimum: PyTorch's images. `make clients` installs it into out/clients/optimum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxplug.cli.app import run

diffusers = pytest.importorskip("diffusers")

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "images": ({"rtol": 0, "atol": 3e-5}, "three steps of a whole pipeline, each of which goes on with the one before"),
}
ROOT = Path(__file__).parents[3]
PLACE = Path(os.environ.get("ONNXPLUG_CLIENTS", ROOT / "out" / "clients")) / "optimum"
SCRIPT = ROOT / "contrib" / "onnxplug-transformers" / "tests" / "clients" / "optimum_models.py"
pytestmark = pytest.mark.skipif(not PLACE.is_dir(), reason="needs optimum in out/clients/optimum: make clients")


def save_tokenizers(folder: Path) -> None:
    """Saves tokenizers of CLIP's class, of letters alone."""
    index = json.loads((folder / "model_index.json").read_text())
    letters = [chr(code) for code in range(97, 123)]
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += [f"x{number}" for number in range(98 - len(words))] + ["<|startoftext|>", "<|endoftext|>"]
    last = "<|endoftext|>"
    about = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 16, "bos_token": "<|startoftext|>"}
    about |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), last)
    for name in ["tokenizer", *(["tokenizer_2"] if "text_encoder_2" in index else [])]:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
        (folder / name / "merges.txt").write_text("#version: 0.2\n")
        (folder / name / "tokenizer_config.json").write_text(json.dumps(about))
        index[name] = ["transformers", "CLIPTokenizer"]
    index |= {"feature_extractor": [None, None], "requires_safety_checker": False}
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["stable-diffusion", "stable-diffusion-xl"])
def test_images(kind: str, pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    folder, output = pipeline(kind), tmp_path / "onnx"
    save_tokenizers(folder)
    assert run(["export", f"diffusers:{folder}", "-o", str(output)]) == 0
    images = [("a small cat", 32, 32), ("the zebra", 40, 24)]
    calls = [
        {"prompt": prompt, "num_inference_steps": 3, "seed": 5, "height": height, "width": width}
        for prompt, height, width in images
    ]
    job = {"class": "ORTDiffusionPipeline", "folder": str(output), "calls": calls, "generate": None}
    environment = {**os.environ, "PYTHONPATH": f"{PLACE}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, SCRIPT], input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.rpartition("RESULT")[2])
    model: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    model.set_progress_bar_config(disable=True)
    for call, result in zip(calls, results, strict=True):
        given = {name: value for name, value in call.items() if name != "seed"}
        exact = model(**given, generator=torch.Generator().manual_seed(5), output_type="np").images
        assert exact.std() > 0.1
        torch.testing.assert_close(torch.tensor(result), torch.from_numpy(exact), **LOOSER["images"][0])
