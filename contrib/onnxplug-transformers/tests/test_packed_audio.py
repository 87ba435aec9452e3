"""Encoders of sounds packed in one row: any number of sounds, of any lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "sounds": (
        {"rtol": 1e-4, "atol": 1e-5},
        "layers of attention in one row, with a mask, for one product for each window",
    )
}


class Encoder(nn.Module):
    """The states of Qwen3-ASR's encoder; windows of two chunks of 100 frames, of which convolutions make 13 states."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        from transformers import Qwen3ASREncoder, Qwen3ASREncoderConfig

        settings = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32}
        settings |= {"num_mel_bins": 16, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 200}
        self.model = Qwen3ASREncoder(Qwen3ASREncoderConfig(**settings, attn_implementation=attention)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))

    def forward(self, input_features: Any, input_features_mask: Any) -> Any:
        return self.model(input_features, input_features_mask).last_hidden_state


def sounds(chunks: int, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sounds padded to some chunks, and their mask."""
    frames = chunks * 100
    mask = (torch.arange(frames) < torch.tensor(lengths)[:, None]).long()
    return torch.randn(len(lengths), 16, frames), mask


FRAMES = 100 * torch.export.Dim("chunks", min=1)
DYNAMIC = ({0: "batch", 2: FRAMES}, {0: "batch", 1: FRAMES})
#: Sounds of less than a chunk, of whole windows, without a frame, and of one state. The longest chunk of the third has 4 states.
CASES = [
    sounds(3, 250, 120),
    sounds(5, 500, 401, 1, 200),
    sounds(1, 30, 12),
    sounds(2, 0, 199),
    sounds(1, 1),
    sounds(4, 400),
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sounds_of_any_length(attention: str) -> None:
    model = Encoder(attention)
    program = onnxplug.to_onnx(model, CASES[0], dynamic_shapes=DYNAMIC)
    for case in CASES:
        with torch.no_grad():
            expected = model(*case)
        torch.testing.assert_close(program(*case)[0], expected, **LOOSER["sounds"][0])


@pytest.mark.parametrize("window", [100, 200, 800])
def test_windows_are_those_of_transformers(window: int) -> None:
    from onnxplug_transformers.packed_audio import windows
    from transformers.models.qwen3_asr import modeling_qwen3_asr
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

    for _, mask in CASES:
        args = mask.view(len(mask), -1, 100).sum(-1).flatten(), mask.sum(-1), window, 50
        for module in (modeling_qwen3_asr, modeling_qwen3_omni_moe):
            expected = module.get_audio_cu_seqlens(*args)
            torch.testing.assert_close(windows(*args), expected)


def test_windows_that_are_not_all_states_are_refused() -> None:
    """A mask with a gap between frames: the chunks have other numbers of states than the whole sound."""
    model = Encoder()
    program = onnxplug.to_onnx(model, CASES[0], dynamic_shapes=DYNAMIC)
    features, mask = sounds(3, 300, 300)
    mask[0, 50:110] = 0
    with pytest.raises(RuntimeError, match="split"):
        model(features, mask)
    with pytest.raises(Exception, match=r"indices element out of data bounds|out of bounds"):
        program(features, mask)
    silent = sounds(2, 0, 0)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        model(*silent)
    with pytest.raises(Exception, match="by zero"):
        program(*silent)
