"""Convolutions over sound that pad it to a multiple of their stride: sound of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug

#: Kernel, stride and dilation; lengths of the example and of others, multiples of the stride and not.
SHAPES = [(7, 1, 1), (4, 2, 1), (5, 3, 1), (3, 1, 2), (10, 5, 1)]
LENGTHS = (60, 61, 64, 33)


def encodec(kernel: int, stride: int, dilation: int, **settings: Any) -> Any:
    from transformers.models.encodec import modeling_encodec

    config = modeling_encodec.EncodecConfig(**settings)
    return modeling_encodec.EncodecConv1d(config, 2, 3, kernel, stride=stride, dilation=dilation)


def mimi(kernel: int, stride: int, dilation: int, **settings: Any) -> Any:
    from transformers.models.mimi import modeling_mimi

    config = modeling_mimi.MimiConfig(**settings)
    return modeling_mimi.MimiConv1d(config, 2, 3, kernel, stride=stride, dilation=dilation)


def pocket(kernel: int, stride: int, dilation: int, **settings: Any) -> Any:
    from transformers.models.pocket_tts_audio_tokenizer import modeling_pocket_tts_audio_tokenizer as pocket_tts

    config = pocket_tts.PocketTTSAudioTokenizerConfig(**settings)
    return pocket_tts.PocketTTSAudioTokenizerConv1d(config, 2, 3, kernel, stride=stride, dilation=dilation)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [encodec, mimi, pocket])
@pytest.mark.parametrize("shape", SHAPES)
def test_sound_of_any_length(make: Any, shape: tuple[int, int, int], causal: bool, mode: str) -> None:
    model = make(*shape, use_causal_conv=causal, pad_mode=mode).eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, 2, LENGTHS[0]),), dynamic_shapes=({0: "batch", 2: "length"},))
    for length in LENGTHS:
        x = torch.randn(3, 2, length)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(program(x)[0], expected)
