"""Recordings of any length, in chunks that see frames of earlier chunks, kept in a queue and a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {"chunks": ({"rtol": 1e-4, "atol": 1e-4}, "layers of attention for each chunk, over rows of another length")}
_AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_mel_bins": 8,
    "max_position_embeddings": 512,
}


def _stirred(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def _config(speakers: int, queue: int, period: int, cache: int, **options: Any) -> Any:
    from transformers import Nemotron3DiarizationConfig

    return Nemotron3DiarizationConfig(
        audio_config=_AUDIO,
        head_config={"audio_hidden_size": 32, "hidden_size": 16, "num_speakers": speakers},
        streaming_config={
            "num_speakers": speakers,
            "speaker_cache_length": cache,
            "speaker_cache_silence_frames_per_speaker": 1,
        },
        chunk_length=4,
        chunk_left_context=2,
        chunk_right_context=1,
        fifo_length=queue,
        speaker_cache_update_period=period,
        **options,
    )


class Diarization(nn.Module):
    """The logits of a recording; a chunk has 4 times 8 frames."""

    def __init__(
        self, speakers: int = 4, queue: int = 5, period: int = 4, cache: int = 40, attention: str = "sdpa"
    ) -> None:
        super().__init__()
        from transformers import Nemotron3DiarizationForAudioFrameClassification

        config = _config(speakers, queue, period, cache, attn_implementation=attention)
        self.model = _stirred(Nemotron3DiarizationForAudioFrameClassification(config))

    def forward(self, input_features: Any, attention_mask: Any = None) -> Any:
        return self.model(input_features, attention_mask=attention_mask).logits


def recording(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of recordings and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randn(len(lengths), max(lengths), 8), mask.long()


DYNAMIC = ({0: "batch", 1: "frames"}, {0: "batch", 1: "frames"})
CASES = [recording(80, 61), recording(5), recording(33, 1, 20), recording(150, 32), recording(320), recording(8, 8)]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recordings_of_any_length(attention: str, masked: bool) -> None:
    """The queue overflows into a cache that is large enough."""
    model, inputs = Diarization(attention=attention), 2 if masked else 1
    program = onnxplug.to_onnx(model, CASES[0][:inputs], dynamic_shapes=DYNAMIC[:inputs])
    for case in CASES:
        with torch.no_grad():
            expected = model(*case[:inputs])
        torch.testing.assert_close(program(*case[:inputs])[0], expected, **LOOSER["chunks"][0])


@pytest.mark.parametrize(("sizes", "lengths"), [((1, 5, 4, 12), (90, 320, 801)), ((4, 3, 9, 16), (90, 184))])
def test_a_cache_that_is_compressed(
    sizes: tuple[int, ...], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several speakers, one compression: it keeps frames twice, and the order of equal frames is not defined."""
    from transformers.models.nemotron3_diarization.modeling_nemotron3_diarization import (
        Nemotron3DiarizationSpeakerCache,
    )

    before, times = Nemotron3DiarizationSpeakerCache._compress, []

    def counted(*args: Any) -> Any:
        times.append(None)
        return before(*args)

    model = Diarization(*sizes)
    program = onnxplug.to_onnx(model, recording(80, 61), dynamic_shapes=DYNAMIC)
    with monkeypatch.context() as patch:
        patch.setattr(Nemotron3DiarizationSpeakerCache, "_compress", counted)
        for length in lengths:
            case = recording(length, length - 7)
            with torch.no_grad():
                expected = model(*case)
            torch.testing.assert_close(program(*case)[0], expected, **LOOSER["chunks"][0])
    assert len(times) > 5 if sizes[0] == 1 else len(times) == 1


def test_a_chunk_of_a_stream_is_computed_by_transformers() -> None:
    from onnxplug_transformers.diarization import recordings_of_any_length

    model = Diarization().model
    with torch.no_grad(), recordings_of_any_length():
        output = model(recording(40)[0], num_lookahead_frames=1)
    assert output.speaker_cache is not None


class Transcribe(nn.Module):
    """States of speech and of the speakers."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        from transformers import Nemotron3_5TranscribeAudioConfig, Nemotron3_5TranscribeAudioModel

        config = Nemotron3_5TranscribeAudioConfig(
            asr_config=_AUDIO,
            diarization_config=_config(4, 5, 4, 40),
            attn_implementation=attention,
        )
        self.model = _stirred(Nemotron3_5TranscribeAudioModel(config))

    def forward(self, input_features: Any, input_features_mask: Any) -> Any:
        output = self.model(input_features, input_features_mask)
        return output.asr_last_hidden_state, output.speaker_logits, output.last_hidden_state


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chunks_of_speech_are_one_batch(attention: str) -> None:
    model = Transcribe(attention)
    frames = 8 * torch.export.Dim("frames", min=1)
    dynamic = {0: "batch", 1: frames}
    program = onnxplug.to_onnx(model, recording(80, 61), dynamic_shapes=(dynamic, dynamic))
    for case in (recording(8), recording(32, 7), recording(160, 150, 60), recording(40, 33)):
        with torch.no_grad():
            expected = model(*case)
        states, logits, _ = program(*case)
        torch.testing.assert_close((states, logits), expected[:2], **LOOSER["chunks"][0])
