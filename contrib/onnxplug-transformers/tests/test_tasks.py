"""`onnxplug export transformers:FOLDER` for models of one call: text, images and sound, against transformers' own results."""

from __future__ import annotations

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

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {**_SIZES, "vocab_size": 100, "max_position_embeddings": 64, "initializer_range": 0.15}
_SOUND = {
    **_SIZES,
    "vocab_size": 32,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "classifier_proj_size": 16,
}


def text(*sizes: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, sizes)
    mask = torch.ones_like(ids)
    mask[0, sizes[1] // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def with_kinds(*sizes: int) -> dict[str, torch.Tensor]:
    return {**text(*sizes), "token_type_ids": torch.randint(0, 2, sizes)}


#: The model's class, the configuration's class and settings, inputs of other sizes than the export's, outputs.
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]], list[str]]] = {
    "feature-extraction": (
        "BertModel",
        "BertConfig",
        _TEXT,
        lambda: with_kinds(3, 9),
        ["last_hidden_state", "pooler_output"],
    ),
    "text-classification": (
        "BertForSequenceClassification",
        "BertConfig",
        {**_TEXT, "num_labels": 3},
        lambda: with_kinds(1, 4),
        ["logits"],
    ),
    "text-classification by a decoder": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**_TEXT, "num_labels": 3, "pad_token_id": 0},
        lambda: text(3, 9),
        ["logits"],
    ),
    "token-classification": (
        "RobertaForTokenClassification",
        "RobertaConfig",
        {**_TEXT, "type_vocab_size": 1, "num_labels": 5},
        lambda: text(3, 9),
        ["logits"],
    ),
    "question-answering": (
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        lambda: text(3, 9),
        ["start_logits", "end_logits"],
    ),
    "fill-mask": ("BertForMaskedLM", "BertConfig", _TEXT, lambda: with_kinds(3, 9), ["logits"]),
    "image-classification": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_SIZES, "image_size": 32, "patch_size": 8, "initializer_range": 0.15},
        lambda: {"pixel_values": torch.randn(3, 3, 32, 32)},
        ["logits"],
    ),
    "speech-ctc": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _SOUND,
        lambda: {"input_values": torch.randn(1, 4321)},
        ["logits"],
    ),
    "audio-classification": (
        "ASTForAudioClassification",
        "ASTConfig",
        {**_SIZES, "max_length": 64, "num_mel_bins": 32},
        lambda: {"input_values": torch.randn(3, 64, 32)},
        ["logits"],
    ),
    "audio-classification of samples": (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        _SOUND,
        lambda: {"input_values": torch.randn(3, 5000)},
        ["logits"],
    ),
    "speech-ctc of spectrograms": (
        "Wav2Vec2BertForCTC",
        "Wav2Vec2BertConfig",
        {
            **_SIZES,
            "vocab_size": 32,
            "feature_projection_input_dim": 20,
            "left_max_position_embeddings": 8,
            "right_max_position_embeddings": 4,
        },
        lambda: {"input_features": torch.randn(3, 31, 20), "attention_mask": torch.ones(3, 31, dtype=torch.long)},
        ["logits"],
    ),
}
BY_DEFAULT = ("text-classification", "image-classification", "speech-ctc")


def made(name: str) -> nn.Module:
    import transformers

    model, config, settings, _, _ = MODELS[name]
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.std() < 1e-3:  # unit norms, zero biases
                parameter.add_(0.1 * torch.randn_like(parameter))
    return built.eval()


def export(folder: Path, *options: Any) -> int:
    return run(["export", f"transformers:{folder}", "-o", str(folder.parent / "onnx"), *map(str, options)])


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
@pytest.mark.long
def test_results_are_those_of_transformers(name: str, tmp_path: Path, save_tokenizer: Any) -> None:
    """The task is that of the class in config.json; inputs and outputs have the model's names."""
    _, _, _, inputs, outputs = MODELS[name]
    model, folder = made(name), tmp_path / "model"
    model.save_pretrained(folder)
    if "input_ids" in inputs():
        assert export(folder) == 2  # no tokenizer
        save_tokenizer(folder)
    assert export(folder, "--verify") == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert [value.name for value in session.get_outputs()] == outputs
    given = inputs()
    assert {value.name for value in session.get_inputs()} == set(given)
    with torch.no_grad():
        expected = model(**given)
    for value, key in zip(session.run(None, {k: v.numpy() for k, v in given.items()}), outputs, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), expected[key], **LOOSER["models"][0])
    assert (tmp_path / "onnx" / "config.json").is_file()
    assert not (tmp_path / "onnx" / "genai_config.json").exists()


@pytest.mark.long
def test_a_task_that_is_asked_for(tmp_path: Path, save_tokenizer: Any) -> None:
    """A model without its head; a head that the checkpoint doesn't have would be random, and is refused."""
    model, folder = made("text-classification"), tmp_path / "model"
    model.save_pretrained(folder)
    save_tokenizer(folder)
    assert export(folder, "--task", "fill-mask") == 1
    assert export(folder, "--task", "feature-extraction") == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    given = with_kinds(2, 5)
    states, _ = session.run(None, {k: v.numpy() for k, v in given.items()})
    with torch.no_grad():
        expected = model.bert(**given).last_hidden_state
    torch.testing.assert_close(torch.from_numpy(states), expected, **LOOSER["models"][0])


def test_images_of_no_size(tmp_path: Path, capsys: Any) -> None:
    import transformers

    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model") == 2
    assert "how large images are" in capsys.readouterr().err
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 40}}')
    assert export(tmp_path / "model") == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 3, 40, 40]
    assert (tmp_path / "onnx" / "preprocessor_config.json").is_file()
