"""Bytes of a sound file to samples, and to the spectrogram that Whisper and its like take."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn import functional

from onnxplug import UsageError
from onnxplug_extensions import DOMAIN
from onnxplug_extensions.library import check_library
from onnxplug_extensions.parts import refuse, typed


@torch.library.custom_op("onnxplug_extensions::decode_sound", mutates_args=())
def decode_sound(data: torch.Tensor) -> torch.Tensor:
    """The samples, float32, of the bytes of a WAV file with one channel of 16 or 32 bits."""
    with wave.open(io.BytesIO(data.numpy().tobytes())) as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        if width not in (2, 4) or channels != 1:
            raise UsageError(
                f"the file has {channels} channels of {8 * width} bits; in PyTorch it may be one of 16 or 32 bits"
            )
        numbers = np.frombuffer(file.readframes(file.getnframes()), {2: "<i2", 4: "<i4"}[width])
    return torch.from_numpy((numbers / (1 << 8 * width - 1)).astype(np.float32))


@decode_sound.register_fake
def _(data: torch.Tensor) -> torch.Tensor:
    torch._check(data.dim() == 1, lambda: f"decode_sound: the bytes of one file, not a tensor of {data.dim()} axes")
    return data.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.float32)


def convert_decode_sound(g: Any, node: Any) -> Any:
    """decode_sound(Tensor data) -> Tensor"""
    (data,) = node.args
    check_library()
    samples = g.domain(DOMAIN, 1).AudioDecoder(g.op.Unsqueeze(data, g.const([0])))
    return g.op.Reshape(typed(samples, ir.DataType.FLOAT, 2), g.const([-1]))


class Sound(nn.Module):
    """The bytes of a sound file, with the sampling rate of the model, to its samples.

    In the file the library decodes WAV, MP3 and FLAC; in PyTorch it is a WAV file with one channel of 16 or 32 bits.
    """

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """float32, [samples], between -1 and 1.

        Args:
            data: The bytes, uint8.
        """
        return torch.ops.onnxplug_extensions.decode_sound(data)


class LogMel(nn.Module):
    """Samples to the logarithms of a mel spectrogram, as Whisper's feature extractor makes it.

    Samples are cut, or filled with 0, to the extractor's length.

    Args:
        extractor: A ``WhisperFeatureExtractor``.

    Raises:
        UsageError: It has dither.
    """

    def __init__(self, extractor: Any) -> None:
        super().__init__()
        refuse(bool(getattr(extractor, "dither", 0.0)), "it adds noise (dither)")
        self._size, self._step, self._samples = extractor.n_fft, extractor.hop_length, extractor.n_samples
        self.filters = nn.Buffer(torch.from_numpy(np.asarray(extractor.mel_filters)).float().t().contiguous())
        self.window = nn.Buffer(torch.hann_window(self._size))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """float32, [1, bands, frames].

        Args:
            samples: float32, [samples].
        """
        filled = torch.narrow(functional.pad(samples, (0, self._samples)), 0, 0, self._samples)
        spectrum = torch.stft(filled.unsqueeze(0), self._size, self._step, window=self.window, return_complex=True)
        logarithms = (self.filters @ spectrum[..., :-1].abs().square()).clamp(min=1e-10).log10()
        return (logarithms.maximum(logarithms.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0
