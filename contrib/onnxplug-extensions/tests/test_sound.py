"""Sound files as inputs, compared with Python's own reader and with transformers' feature extractor."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime_extensions", reason="`make packages` tests with it, in an environment of its own")

import torch
import transformers
from onnxplug_extensions import LogMel, Sound

import onnxplug

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "spectrum": ({"rtol": 1e-4, "atol": 1e-4}, "logarithms of sums that nearly cancel, and transformers' in float64")
}


def file_of(samples: np.ndarray, bits: int = 16, channels: int = 1) -> torch.Tensor:
    """The bytes of a WAV file."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(bits // 8)
        file.setframerate(16000)
        file.writeframes((samples * (2 ** (bits - 1) - 1)).astype(f"<i{bits // 8}").tobytes())
    return torch.from_numpy(np.frombuffer(content.getvalue(), np.uint8).copy())


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).clip(-4, 4) / 5


@pytest.mark.parametrize("opset", [18, 21])
def test_samples(opset: int) -> None:
    files = [file_of(drawn(400)), file_of(drawn(3, 1)), file_of(drawn(999, 2), 32), file_of(np.array([1.0, -1.0]))]
    program = onnxplug.to_onnx(Sound(), (files[0],), dynamic_shapes=({0: "bytes"},), opset_version=opset)
    for data in files:
        torch.testing.assert_close(program(data)[0], Sound()(data))
    assert program(files[1])[0].shape == (3,)


@pytest.mark.parametrize(("bits", "channels"), [(8, 1), (16, 2)])
def test_files_that_pytorch_does_not_read(bits: int, channels: int) -> None:
    with pytest.raises(onnxplug.UsageError, match=f"{channels} channels of {bits} bits"):
        Sound()(file_of(drawn(40) if bits > 8 else np.zeros(40), bits, channels))


def test_spectrogram_of_whisper(tmp_path: Path) -> None:
    """Sounds shorter and longer than 2 seconds, and silence."""
    extractor = transformers.WhisperFeatureExtractor(chunk_length=2, feature_size=80)
    model = torch.nn.Sequential(Sound(), LogMel(extractor)).eval()
    files = [file_of(drawn(count, count)) for count in (16000, 1, 40000)] + [file_of(np.zeros(100))]
    program = onnxplug.to_onnx(model, (files[0],), tmp_path / "mel.onnx", dynamic_shapes=({0: "bytes"},))
    session = onnxplug.runtime.inference_session(str(tmp_path / "mel.onnx"))
    for data in files:
        samples = Sound()(data).numpy()
        wanted = torch.from_numpy(extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"])
        (got,) = session.run(None, {session.get_inputs()[0].name: data.numpy()})
        for result in (program(data)[0], torch.from_numpy(got), model(data)):
            torch.testing.assert_close(result, wanted, **LOOSER["spectrum"][0])
