"""Folders of `--for optimum`, loaded by optimum's own classes: PyTorch's numbers and tokens.

`make clients` installs optimum into out/clients/optimum, with the version of transformers that it supports, and runs
these tests.
"""

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

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "models": ({"rtol": 1e-3, "atol": 1e-4}, "rounding adds up over the layers of a model"),
}
ROOT = Path(__file__).parents[3]
PLACE = Path(os.environ.get("ONNXPLUG_CLIENTS", ROOT / "out" / "clients")) / "optimum"
pytestmark = pytest.mark.skipif(not PLACE.is_dir(), reason="needs optimum in out/clients/optimum: make clients")

_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "initializer_range": 0.15,
}
STEPS = {"max_new_tokens": 10, "do_sample": False}


def by_optimum(
    kind: str, folder: Path, calls: list[dict[str, torch.Tensor]], generate: Any = None
) -> list[torch.Tensor]:
    """The result of a class of optimum at each call."""
    given = [{name: value.tolist() for name, value in inputs.items()} for inputs in calls]
    job = {"class": kind, "folder": str(folder), "calls": given, "generate": generate}
    script = Path(__file__).parent / "clients" / "optimum_models.py"
    environment = {**os.environ, "PYTHONPATH": f"{PLACE}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [torch.tensor(result) for result in json.loads(done.stdout.rpartition("RESULT")[2])]


def check(model: Any, kind: str, output: Path, calls: list[dict[str, torch.Tensor]], generate: Any = None) -> None:
    """Compares numbers, or tokens, with PyTorch's."""
    for inputs, result in zip(calls, by_optimum(kind, output, calls, generate), strict=True):
        with torch.no_grad():
            exact = model(**inputs)[0] if generate is None else model.generate(**inputs, **generate)
        torch.testing.assert_close(result, exact, **(LOOSER["models"][0] if generate is None else {}))


def texts() -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(3, 100, shape) for shape in ((2, 7), (1, 4))]
    return [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} for tokens in rows]


def export(folder: Path) -> Path:
    output = folder.parent / f"{folder.name}-onnx"
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--for", "optimum"]) == 0
    return output


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("BertModel", "ORTModelForFeatureExtraction"),
        ("BertForSequenceClassification", "ORTModelForSequenceClassification"),
        ("BertForTokenClassification", "ORTModelForTokenClassification"),
        ("BertForMaskedLM", "ORTModelForMaskedLM"),
    ],
)
def test_texts(model: str, kind: str, tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> None:
    import transformers

    made: Any = getattr(transformers, model)(transformers.BertConfig(**_TEXT)).eval()
    made.save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    check(made, kind, export(tmp_path / "bert"), texts())


@pytest.mark.parametrize(
    ("name", "loader", "kind"),
    [
        ("llama", "AutoModelForCausalLM", "ORTModelForCausalLM"),
        ("gpt2", "AutoModelForCausalLM", "ORTModelForCausalLM"),
        ("t5", "AutoModelForSeq2SeqLM", "ORTModelForSeq2SeqLM"),
        ("bart", "AutoModelForSeq2SeqLM", "ORTModelForSeq2SeqLM"),
    ],
)
def test_generation(name: str, loader: str, kind: str, saved: Callable[[str], Path]) -> None:
    import transformers

    folder = saved(name)
    model: Any = getattr(transformers, loader).from_pretrained(folder).eval()
    check(model, kind, export(folder), texts(), STEPS)


@pytest.mark.long
def test_speech(saved: Callable[[str], Path]) -> None:
    import transformers

    folder = saved("whisper")
    about = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 0.4}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    calls = [{"input_features": torch.randn(batch, 16, 40)} for batch in (1, 2)]
    check(model, "ORTModelForSpeechSeq2Seq", export(folder), calls, STEPS)


@pytest.mark.long
def test_images(tmp_path: Path) -> None:
    import transformers

    sizes = {key: _TEXT[key] for key in list(_TEXT)[:4]}
    model: Any = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    model.eval().save_pretrained(tmp_path / "vit")
    about = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(about))
    calls = [{"pixel_values": torch.randn(batch, 3, 32, 32)} for batch in (1, 3)]
    check(model, "ORTModelForImageClassification", export(tmp_path / "vit"), calls)
