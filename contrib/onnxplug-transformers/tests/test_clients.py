"""Folders of `--for transformers.js`, loaded by transformers.js in Node and in Chromium with local files alone: PyTorch's numbers
and tokens.

`make clients` installs the package into out/clients and runs these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxplug.cli.app import run
from tests.support import browser
from tests.support.served import served

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "models": ({"rtol": 1e-3, "atol": 1e-4}, "rounding adds up over the layers of a model"),
    "sound": ({"rtol": 1e-3, "atol": 1e-2}, "transformers.js computes spectrograms in other steps"),
}
PLACE = Path(os.environ.get("ONNXPLUG_CLIENTS", Path(__file__).parents[3] / "out" / "clients")) / "node_modules"
CLIENTS = Path(__file__).parent / "clients"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (PLACE / "@huggingface" / "transformers").is_dir(),
    reason="needs node and the npm package @huggingface/transformers: make clients",
)

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {**_SIZES, "vocab_size": 100, "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 0}
_IMAGE = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "do_normalize": True, "do_rescale": True}
_FIXED = {**_IMAGE, "rescale_factor": 1 / 255, "do_resize": True, "size": {"height": 32, "width": 32}, "resample": 2}
TEXTS = ["Hello,world!", "a<mask>"]


def called(models: Path, task: str, *args: Any, options: dict[str, Any] | None = None) -> Any:
    """The result of a pipeline of transformers.js in Node for the model in a folder called "onnx"."""
    return in_node(models, {"task": task, "model": "onnx", "options": options or {}, "args": args})


def in_node(models: Path, job: dict[str, Any]) -> Any:
    """The result of a job of pipelines.mjs."""
    script = CLIENTS / "pipelines.mjs"
    done = subprocess.run(
        ["node", script, models, PLACE], input=json.dumps([job]), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


def called_in_browser(models: Path, task: str, *args: Any, options: dict[str, Any] | None = None) -> Any:
    """The same in a browser without a window, by wasm; it requests nothing but files of this machine."""
    jobs = json.dumps([{"task": task, "model": "onnx", "options": {**(options or {}), "device": "wasm"}, "args": args}])
    html = '<!doctype html><script type="module" src="/clients/browser.mjs"></script>'
    with served(html, models=models, node_modules=PLACE, clients=CLIENTS) as address, browser.browser() as page:
        page.navigate(address)
        found = json.loads(page.run(f"called({jobs})", timeout=300))[0]
        files = [request for request in page.requests if not request.startswith(("blob:", "data:"))]
    assert all(file.startswith(address) for file in files), files
    assert any(file.endswith(".wasm") for file in files)
    return found


#: The clients of the pipelines that a browser runs too.
BOTH = pytest.mark.parametrize(
    "called",
    [
        pytest.param(called, id="node"),
        pytest.param(
            called_in_browser,
            id="browser",
            marks=pytest.mark.skipif(
                browser.find() is None, reason="no browser is installed: apt-get install chromium"
            ),
        ),
    ],
)


def made(name: str, config: str, **settings: Any) -> Any:
    """A model of transformers with random weights, none of them constant."""
    import transformers

    model: Any = getattr(transformers, name)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() == 1 or parameter.std() < 1e-3:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def export(model: Any, folder: Path, *options: str, processor: dict[str, Any] | None = None) -> Path:
    """Saves a model, and exports it into the folder "onnx" beside."""
    model.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    target = folder.parent / "onnx"
    assert run(["export", f"transformers:{folder}", "-o", str(target), "--for", "transformers.js", *options]) == 0
    return target


@pytest.fixture
def tokenizer(tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> Any:
    """The tokenizer in the folder of the model, with a token that stands for a masked one."""
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", mask_token="<mask>")
    loaded.save_pretrained(tmp_path / "model")
    return loaded


def close(result: Any, expected: Any, kind: str = "models") -> None:
    torch.testing.assert_close(torch.tensor(result).double(), torch.as_tensor(expected).double(), **LOOSER[kind][0])


def pixels(*sizes: int) -> tuple[list[Any], torch.Tensor]:
    """An image, and the processor's result for it, [1, 3, height, width]."""
    image = torch.randint(0, 256, (*sizes, 3))
    mean, std = torch.tensor(_IMAGE["image_mean"]), torch.tensor(_IMAGE["image_std"])
    return image.tolist(), ((image / 255 - mean) / std).permute(2, 0, 1)[None]


@BOTH
def test_feature_extraction(called: Any, tmp_path: Path, tokenizer: Any) -> None:
    model = made("BertModel", "BertConfig", **_TEXT)
    export(model, tmp_path / "model", "--verify")
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    close(called(tmp_path, "feature-extraction", TEXTS), states)
    mask = inputs["attention_mask"][..., None]
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    close(called(tmp_path, "feature-extraction", TEXTS, {"pooling": "mean", "normalize": True}), pooled)


@BOTH
def test_text_classification(called: Any, tmp_path: Path, tokenizer: Any) -> None:
    model = made("BertForSequenceClassification", "BertConfig", **_TEXT, num_labels=3)
    export(model, tmp_path / "model")
    with torch.no_grad():
        expected = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.softmax(-1)
    for row, scores in zip(called(tmp_path, "text-classification", TEXTS, {"top_k": 3}), expected, strict=True):
        found = {item["label"]: item["score"] for item in row}
        close([found[f"LABEL_{number}"] for number in range(3)], scores)


def test_token_classification(tmp_path: Path, tokenizer: Any) -> None:
    model = made("BertForTokenClassification", "BertConfig", **_TEXT, num_labels=4)
    export(model, tmp_path / "model")
    with torch.no_grad():
        expected = model(**tokenizer(TEXTS[:1], return_tensors="pt")).logits[0].softmax(-1)
    found = called(tmp_path, "token-classification", TEXTS[0])
    assert [item["entity"] for item in found] == [f"LABEL_{label}" for label in expected.argmax(-1)]
    close([item["score"] for item in found], expected.max(-1).values)


def test_fill_mask(tmp_path: Path, tokenizer: Any) -> None:
    model = made("BertForMaskedLM", "BertConfig", **_TEXT)
    export(model, tmp_path / "model")
    inputs = tokenizer("ab<mask>d", return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        expected = model(**inputs).logits[0, place].softmax(-1).topk(5)
    found = called(tmp_path, "fill-mask", "ab<mask>d")
    assert [item["token"] for item in found] == expected.indices.tolist()
    close([item["score"] for item in found], expected.values)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_text_generation(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """Prompts of unequal length, which the client pads on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = saved(name)
    output = exported(folder, "--for", "transformers.js", "--dtypes", "fp32,fp16,q8,q4,q4f16", "--verify")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = ["Hello,world!", "abc"]
    with torch.no_grad():
        text = model.generate(
            **tokenizer(prompts, padding=True, return_tensors="pt"), max_new_tokens=12, do_sample=False
        )
    expected = tokenizer.batch_decode(text, skip_special_tokens=True)
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert len({*expected[0][-12:]}) > 4
    for dtype in ("fp32", "fp16"):
        found = called(output.parent, "text-generation", prompts, settings, options={"dtype": dtype})
        assert [row[0]["generated_text"] for row in found] == expected
    for dtype in ("q8", "q4", "q4f16"):
        found = called(output.parent, "text-generation", prompts, settings, options={"dtype": dtype})
        assert [row[0]["generated_text"][: len(prompt)] for row, prompt in zip(found, prompts, strict=True)] == prompts


@pytest.mark.long
def test_summarization(saved: Callable[[str], Path], exported: Any) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = saved("t5")
    output = exported(folder, "--for", "transformers.js", "--dtypes", "fp32,q8", "--verify")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        text = model.generate(
            **tokenizer(["Hello,world!", "abc"], padding=True, return_tensors="pt"), max_new_tokens=12, do_sample=False
        )
    expected = tokenizer.batch_decode(text, skip_special_tokens=True)
    assert len({*"".join(expected)}) > 4
    assert expected[0] != expected[1]
    settings = {"max_new_tokens": 12, "do_sample": False}
    found = called(output.parent, "summarization", ["Hello,world!", "abc"], settings)
    assert [row["summary_text"] for row in found] == expected
    called(output.parent, "summarization", ["Hello,world!", "abc"], settings, options={"dtype": "q8"})


@pytest.mark.long
def test_automatic_speech_recognition(tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> None:
    from transformers import WhisperFeatureExtractor

    model = made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=100,
        tie_word_embeddings=False,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        init_std=0.15,
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3 if "embed" in key else 3.0)
        model.get_output_embeddings().weight[:3] = 0
    save_tokenizer(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "WhisperTokenizer"
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    export(model, tmp_path / "model", "--verify", processor=json.loads(extractor.to_json_string()))
    sound = 0.3 * np.sin(np.arange(16000) * np.linspace(0.02, 0.4, 16000)).astype(np.float32)
    features = extractor(sound, sampling_rate=16000, return_tensors="pt")["input_features"]
    with torch.no_grad():
        text = model.generate(features, max_new_tokens=12, do_sample=False, num_beams=1)
    words = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    letters = {index: word.replace("\u0120", " ") for word, index in words.items()}
    expected = "".join(letters[token] for token in text[0].tolist() if token > 2)
    assert len({*expected}) > 4
    found = called(tmp_path, "automatic-speech-recognition", {"sound": sound.tolist()}, {"max_new_tokens": 12})
    assert found["text"] == expected[: len(found["text"])]
    assert len(found["text"]) >= 11


@BOTH
def test_image_classification(called: Any, tmp_path: Path) -> None:
    model = made(
        "ViTForImageClassification",
        "ViTConfig",
        **_SIZES,
        image_size=32,
        patch_size=8,
        initializer_range=0.15,
        num_labels=5,
    )
    export(model, tmp_path / "model", "--verify", processor={**_FIXED, "image_processor_type": "ViTImageProcessor"})
    image, values = pixels(32, 32)
    with torch.no_grad():
        expected = model(values).logits[0].softmax(-1)
    found = called(tmp_path, "image-classification", {"image": image}, {"top_k": 5})
    scores = {item["label"]: item["score"] for item in found}
    close([scores[f"LABEL_{number}"] for number in range(5)], expected)


def _boxes(result: Any, height: int, width: int) -> list[tuple[float, list[float]]]:
    """Scores and corners of the objects that are not background."""
    chances = result.logits[0].softmax(-1)
    found = []
    for row, (x, y, w, h) in zip(chances, result.pred_boxes[0].tolist(), strict=True):
        if int(row.argmax()) < len(row) - 1:
            corners = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
            found.append((float(row.max()), corners))
    return found


@pytest.mark.parametrize("name", ["yolos", "detr"])
def test_object_detection(name: str, tmp_path: Path) -> None:
    """YOLOS for images of one size, DETR for images of any size, as its processor keeps proportions."""
    if name == "yolos":
        model = made(
            "YolosForObjectDetection",
            "YolosConfig",
            **_SIZES,
            image_size=[32, 32],
            patch_size=8,
            num_detection_tokens=6,
            initializer_range=0.15,
            num_labels=4,
        )
        processor = {**_FIXED, "image_processor_type": "YolosImageProcessor"}
        image, values = pixels(32, 32)
    else:
        from transformers import ResNetConfig

        model = made(
            "DetrForObjectDetection",
            "DetrConfig",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"], layer_type="basic"
            ),
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=6,
            num_labels=4,
            init_std=0.15,
        )
        size = {"shortest_edge": 48, "longest_edge": 64}
        processor = {**_FIXED, "size": size, "image_processor_type": "DetrImageProcessor"}
        image, values = pixels(48, 64)
    export(model, tmp_path / "model", "--verify", processor=processor)
    with torch.no_grad():
        expected = _boxes(model(values), len(image), len(image[0]))
    assert expected
    found = called(tmp_path, "object-detection", {"image": image}, {"threshold": 0.0})
    close([item["score"] for item in found], [score for score, _ in expected])
    corners = [[item["box"][key] for key in ("xmin", "ymin", "xmax", "ymax")] for item in found]
    assert corners == [[int(x) for x in row] for _, row in expected]


def test_zero_shot_image_classification(tmp_path: Path, tokenizer: Any) -> None:
    part = {**_SIZES, "projection_dim": 16, "initializer_range": 0.15}
    model = made(
        "CLIPModel",
        "CLIPConfig",
        text_config={**part, "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={**part, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    export(model, tmp_path / "model", "--verify", processor={**_FIXED, "image_processor_type": "CLIPImageProcessor"})
    image, values = pixels(32, 32)
    labels = ["a cat</s>", "two dogs</s>", "x</s>"]
    inputs = tokenizer(labels, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs, pixel_values=values).logits_per_image[0].softmax(-1)
    found = called(
        tmp_path,
        "zero-shot-image-classification",
        {"image": image},
        labels,
        {"hypothesis_template": "{}"},
    )
    scores = {item["label"]: item["score"] for item in found}
    close([scores[label] for label in labels], expected)


def generated(models: Path, dtype: str = "fp32", **inputs: torch.Tensor) -> list[list[int]]:
    """The text that transformers.js writes in Node for tokens and images."""
    types = {torch.int64: "int64", torch.float32: "float32", torch.bool: "bool"}
    args: dict[str, Any] = {
        name: {"type": types[x.dtype], "dims": list(x.shape), "data": x.flatten().tolist()}
        for name, x in inputs.items()
    }
    args |= {"max_new_tokens": {"data": 10}, "do_sample": {"data": False}}
    job = {"generate": "AutoModelForImageTextToText", "model": "onnx", "options": {"dtype": dtype}, "args": [args]}
    result: list[list[int]] = in_node(models, job)
    return result


def text_at_its_positions(model: Any, row: list[int], steps: int) -> list[list[int]]:
    """PyTorch's text at the positions that transformers.js 4.3.1 gives Qwen's text without images.

    transformers.js adds the length of the prompt instead of subtracting it, so that the text goes on too far behind the
    prompt.
    """
    text, past, new = list(row), None, torch.tensor([row])
    for step in range(steps):
        places = torch.arange(len(row)) if past is None else torch.tensor([len(row) + step - 1 + 2 * len(row)])
        with torch.no_grad():
            result = model(new, position_ids=places.expand(3, 1, -1), past_key_values=past, use_cache=True)
        past, new = result.past_key_values, result.logits[:, -1:].argmax(-1)
        text.append(int(new))
    return [text]


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_5_vl", "gemma3"])
def test_images_and_text(kind: str, with_images: Callable[[str], Any], tmp_path: Path) -> None:
    """Two images, of two sizes for Qwen2.5-VL, and none."""
    model = with_images(kind)
    export(model, tmp_path / "model", "--verify", "--no-tokenizer", "--dtypes", "fp32,q8")
    model.generation_config.eos_token_id = None
    rows = [[5, 112, *[110] * 4, 113, 6, 7, 112, *[110] * 4, 113, 9, 10], [5, 6, 7, 8, 9, 10, 35, 21, 11]]
    if kind == "smolvlm":
        images = {"pixel_values": torch.randn(1, 2, 3, 32, 32), "pixel_attention_mask": torch.ones(1, 2, 32, 32).bool()}
        kinds = {}
    elif kind == "gemma3":  # the tokens of an image see the whole image
        images = {"pixel_values": torch.randn(2, 3, 32, 32)}
        kinds = {"token_type_ids": (torch.tensor(rows[:1]) == 110).long()}
    else:
        images = {"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 8]])}
        kinds = {"mm_token_type_ids": (torch.tensor(rows[:1]) == 110).int()}
    for row, pictures, more in ((rows[0], images, kinds), (rows[1], {}, {})):
        inputs = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        with torch.no_grad():
            expected = model.generate(**inputs, **pictures, **more, max_new_tokens=10, do_sample=False).tolist()
        if kind == "qwen2_5_vl" and not pictures:
            expected = text_at_its_positions(model, row, 10)
        assert len({*expected[0][len(row) :]}) > 4
        assert generated(tmp_path, **inputs, **pictures) == expected
        if kind == "gemma3" and pictures:  # the text shows whether the tokens of an image see all of it
            with torch.no_grad():
                other = model.generate(**inputs, **pictures, max_new_tokens=10, do_sample=False).tolist()
            assert other != expected
        assert len(generated(tmp_path, "q8", **inputs, **pictures)[0]) == len(row) + 10
