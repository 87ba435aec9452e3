"""Convolutions over sound that pad it to a multiple of their stride: sound of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug

#: Kernel, stride and dilation; lengths of the example and of other sounds, multiples of the stride or not.
SHAPES = [(7, 1, 1), (4, 2, 1), (5, 3, 1), (3, 1, 2), (10, 5, 1)]
LENGTHS = (60, 61, 64, 33, 1, 2, 5)


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


def _model(**changes: Any) -> Any:
    from transformers.models.encodec import modeling_encodec

    sizes: dict[str, Any] = {"num_filters": 4, "hidden_size": 16, "codebook_dim": 16, "upsampling_ratios": [4, 2]}
    sizes |= {"codebook_size": 16, "num_lstm_layers": 1, "sampling_rate": 800, "target_bandwidths": [0.8, 1.6]}
    model = modeling_encodec.EncodecModel(modeling_encodec.EncodecConfig(**{**sizes, **changes})).eval()
    for layer in model.quantizer.layers:
        layer.codebook.embed.normal_(std=0.3)
    return model


def _sound(batch: int, channels: int, samples: int) -> dict[str, Any]:
    """Sounds, the first of which is the longest."""
    lengths = torch.linspace(samples, max(samples // 2, 1), batch).long()
    mask = (torch.arange(samples) < lengths[:, None])[:, None].expand(-1, channels, -1)
    return {"input_values": torch.randn(batch, channels, samples), "padding_mask": mask}


@pytest.mark.parametrize(
    ("masked", "changes"),
    [(False, {}), (True, {}), (True, {"audio_channels": 2, "normalize": True, "use_causal_conv": False})],
)
def test_encodec_of_any_length(masked: bool, changes: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    """Also sounds shorter than their padding, and lengths that are no multiples of the strides."""
    torch.manual_seed(0)
    model, channels = _model(**changes), changes.get("audio_channels", 1)
    names = ("input_values", "padding_mask") if masked else ("input_values",)

    def case(batch: int, samples: int) -> dict[str, Any]:
        made = _sound(batch, channels, samples)
        return {name: made[name] for name in names}

    dynamic = {name: {0: "batch", 2: "samples"} for name in names}
    program = onnxplug.to_onnx(model, kwargs=case(2, 50), dynamic_shapes=dynamic)
    assert not [one for one in recwarn if "is right only where" in str(one.message)]
    for batch, samples in ((2, 50), (1, 8), (3, 97), (2, 1), (1, 3), (4, 16)):
        program.verify(kwargs=case(batch, samples), seeds=())


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("bandwidth", [None, 1.6, 3.0])
def test_encodec_is_that_of_transformers(as_dict: bool, bandwidth: float | None) -> None:
    from onnxplug_transformers.sizes import dynamic_sizes

    torch.manual_seed(0)
    model = _model()
    codes = torch.randint(0, 16, (1, 2, 2, 7))
    for case in (
        {**_sound(3, 1, 41), "bandwidth": bandwidth},
        {"input_values": torch.randn(2, 1, 30), "bandwidth": bandwidth},
        {"input_values": torch.randn(2, 1, 60), "audio_codes": codes, "audio_scales": [None]},
        {
            "input_values": torch.randn(2, 1, 50),
            "audio_codes": codes,
            "audio_scales": [None],
            "last_frame_pad_length": 2,
        },
        {
            "input_values": torch.randn(2, 1, 50),
            "audio_codes": codes.expand(2, -1, -1, -1),
            "audio_scales": [None, None],
        },
        {"input_values": torch.randn(2, 3, 50)},
    ):
        expected = _of(model, {**case, "return_dict": as_dict})
        with dynamic_sizes():
            result = _of(model, {**case, "return_dict": as_dict})
        assert type(result) is type(expected)
        if not isinstance(expected, ValueError):
            torch.testing.assert_close(
                tuple(result.values()) if as_dict else result, tuple(expected.values()) if as_dict else expected
            )


def _of(model: Any, case: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return model(**case)
    except ValueError as error:
        return error


def test_encodec_in_chunks() -> None:
    """Chunks are transformers' own: their number is the example's."""
    torch.manual_seed(0)
    model = _model(chunk_length_s=0.04, overlap=0.25)
    onnxplug.to_onnx(model, kwargs=_sound(2, 1, 80), dynamic_shapes=None).verify(seeds=())
