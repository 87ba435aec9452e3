"""Modules of sentence-transformers and whole encoders, exported with the inputs that its ONNX backend gives them.

The export of ``backend="onnx"`` itself is optimum's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from torch import nn

from tests.libraries.compare import assert_same

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
}


class Encoder(nn.Module):
    """An encoder of transformers, and modules of sentence-transformers after it."""

    def __init__(self, encoder: nn.Module, *modules: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.after = nn.ModuleList(modules)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[batch, features]."""
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        features = {"token_embeddings": tokens, "attention_mask": attention_mask}
        for module in self.after:
            features = module(features)
        return features["sentence_embedding"]


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask: rows of several lengths, padded on the right."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row in range(1, batch):
        mask[row, length - row :] = 0
    return torch.randint(5, 99, (batch, length)), mask


def export(model: nn.Module, file: str) -> None:
    """As optimum exports an encoder: batch and length are dynamic."""
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in ("input_ids", "attention_mask")}
    torch.onnx.export(
        model,
        inputs(2, 8),
        file,
        input_names=list(axes),
        output_names=["sentence_embedding"],
        dynamic_axes=axes,
        opset_version=17,
        do_constant_folding=True,
        dynamo=False,
    )


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "lasttoken", "weightedmean"])
def test_pooling(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = transformers.BertModel(transformers.BertConfig(**_SMALL)).eval()
    model, file = Encoder(encoder, Pooling(32, mode), Normalize()).eval(), str(tmp_path / "model.onnx")
    export(model, file)
    assert_same(file, model, inputs(2, 8), inputs(3, 11))


@pytest.mark.parametrize("name", ["MPNet", "XLMRoberta", "Albert", "Electra", "ModernBert", "NomicBert"])
def test_encoders(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {**_SMALL, "pad_token_id": 1}
    if name == "Albert":
        small["embedding_size"] = 16
    config = getattr(transformers, f"{name}Config")(**small)
    encoder = getattr(transformers, f"{name}Model")(config).eval()
    model = Encoder(encoder, Pooling(32, "mean"), Dense(32, 12), Normalize()).eval()
    file = str(tmp_path / "model.onnx")
    export(model, file)
    assert_same(file, model, inputs(2, 8), inputs(3, 11))
