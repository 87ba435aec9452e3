"""Layers of Gemma, AIMv2 and Phi-4, whose attention depends on whether any token is padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

_AXES = {0: "batch", 1: "sequence"}
_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 60,
    "use_cache": False,
    "use_bidirectional_attention": True,
}


def _model(family: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    if family == "gemma":
        from transformers.models.gemma import GemmaConfig, GemmaModel

        return GemmaModel(GemmaConfig(**(_SMALL | settings))).eval()
    if family == "aimv2":
        from transformers.models.aimv2 import Aimv2TextConfig, Aimv2TextModel

        return Aimv2TextModel(Aimv2TextConfig(**(_SMALL | {"eos_token_id": 2} | settings))).eval()
    from transformers.models.gemma2 import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(**(_SMALL | {"sliding_window": 6} | settings))).eval()


def _text(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 60, (batch, length))


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_without_a_mask(family: str) -> None:
    """Each token sees all others; Gemma 2's layers with windows do so in a text that is shorter than the window."""
    program = onnxplug.to_onnx(_model(family), (_text(2, 4),), dynamic_shapes=(_AXES,))
    for batch, length in ((2, 4), (1, 5), (3, 6), (2, 9), (1, 1)):
        program.verify(args=(_text(batch, length),), seeds=())


@pytest.mark.parametrize("family", ["gemma", "gemma2", "aimv2"])
def test_with_a_mask(family: str) -> None:
    """Where a token of any row is padding, transformers makes a causal mask for all rows."""
    example = _text(2, 4), torch.ones(2, 4, dtype=torch.long)
    program = onnxplug.to_onnx(_model(family), example, dynamic_shapes=(_AXES, _AXES))
    for batch, length in ((2, 4), (1, 5), (3, 6), (2, 9)):
        for padded in (slice(0, 0), slice(0, 2), slice(-1, None)):
            mask = torch.ones(batch, length, dtype=torch.long)
            mask[0, padded] = 0
            program.verify(args=(_text(batch, length), mask), seeds=())


def test_rows_of_several_texts() -> None:
    """Where positions begin anew within a row, the row is of several texts, and transformers makes a mask."""
    model, axes = _model("gemma"), {"input_ids": _AXES, "position_ids": _AXES}
    texts = {"input_ids": _text(2, 5), "position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])}
    program = onnxplug.to_onnx(model, kwargs=texts, dynamic_shapes=axes)
    program.verify()
    for positions in ([[0, 1, 2, 3]], [[3, 4, 5, 6]], [[0, 1, 0, 1]]):
        program.verify(kwargs={"input_ids": _text(1, 4), "position_ids": torch.tensor(positions)}, seeds=())


@pytest.mark.parametrize("settings", [{"use_bidirectional_attention": False}, {"attn_implementation": "eager"}])
def test_causal_layers_stay_causal(settings: dict[str, Any]) -> None:
    """Attention that is causal, and attention that always gets a mask, are captured as they are."""
    program = onnxplug.to_onnx(_model("gemma", **settings), (_text(2, 4),), dynamic_shapes=(_AXES,))
    program.verify(args=(_text(3, 7),), seeds=())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_patches_of_images(attention: str) -> None:
    """Phi-4's patches see those before them where all patches are shown, and all that are shown otherwise."""
    from transformers.models.phi4_multimodal import modeling_phi4_multimodal as modeling

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = {"image_size": 56, "crop_size": 56, "patch_size": 14, "attn_implementation": attention}
    model = modeling.Phi4MultimodalVisionModel(modeling.Phi4MultimodalVisionConfig(**sizes, **images)).eval()

    def case(batch: int, hidden: int) -> dict[str, torch.Tensor]:
        shown = torch.ones(batch, 4, 4, dtype=torch.bool)
        shown[-1, :hidden] = False
        return {"pixel_values": torch.randn(batch, 3, 56, 56), "patch_attention_mask": shown}

    axes = {name: {0: "batch"} for name in case(2, 0)}
    program = onnxplug.to_onnx(model, kwargs=case(2, 0), dynamic_shapes=axes)
    for batch, hidden in ((2, 0), (1, 0), (3, 2), (1, 1)):
        program.verify(kwargs=case(batch, hidden), seeds=())
