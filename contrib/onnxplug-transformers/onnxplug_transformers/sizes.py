"""transformers' own conversions of sizes to plain numbers while a model is captured: a dynamic size stays dynamic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug_transformers.exchanged import exchanged, modeling_of


def torch_int(x: Any) -> Any:
    """The size itself, a quotient or product of sizes cut as by int(), where transformers' own makes a constant."""
    return x if isinstance(x, torch.SymInt) else torch.sym_int(x)


def torch_float(x: Any) -> Any:
    """The size as a float, where transformers' own makes a constant."""
    return torch.sym_float(x)


def _is_plain(x: Any) -> bool:
    return not isinstance(x, torch.SymInt | torch.SymFloat)


def unfolding(self: Any, features: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """MobileViT's patches: for each place within a patch, a row of all patches' pixels at this place.

    A map whose sides are no multiples of a patch's is resized to multiples, any other map to its own size, which
    changes nothing.
    """
    batch, channels, height, width = features.shape
    down, across = self.patch_height, self.patch_width
    rows, columns = (height + down - 1) // down, (width + across - 1) // across
    features = functional.interpolate(
        features, size=(rows * down, columns * across), mode="bilinear", align_corners=False
    )
    patches = features.reshape(batch, channels, rows, down, columns, across).permute(0, 3, 5, 2, 4, 1)
    return patches.reshape(batch * down * across, rows * columns, channels), {
        "orig_size": (height, width),
        "batch_size": batch,
        "channels": channels,
        "interpolate": True,
        "num_patches": rows * columns,
        "num_patches_width": columns,
        "num_patches_height": rows,
    }


def _is_of_known_size(self: Any, features: Tensor) -> bool:
    return all(isinstance(size, int) for size in features.shape[-2:])


def _padded(self: Any, sound: Tensor) -> Tensor:
    """Sound padded for a convolution, to a multiple of its stride, by the kernel size, stride and dilation.

    transformers has these numbers in buffers, whose values are known only when the model runs, and computes the missing
    length in float32.
    """
    (stride,), (kernel,), (dilation,) = self.conv.stride, self.conv.kernel_size, self.conv.dilation
    total, length = (kernel - 1) * dilation + 1 - stride, sound.shape[-1]
    lacking = (length + stride - 1) // stride * stride - length
    right = 0 if self.causal else total // 2
    left, right = total - right, right + lacking
    if self.pad_mode == "reflect" and not isinstance(length, int):
        return _reflected(sound, left, right)
    padded: Tensor = self._pad1d(sound, (left, right), mode=self.pad_mode)
    return padded


def _reflected(sound: Tensor, left: Any, right: Any) -> Tensor:
    """Sound reflected at its ends; a sound that is too short is filled up with zeros before.

    Args:
        sound: [batch, channels, length], of 1 sample at least.
        left: The number of samples to add in front.
        right: The number of samples to add behind.

    Returns:
        [batch, channels, left + length + right].
    """
    length = sound.shape[-1]
    last = torch.sym_max(length - 1, torch.sym_max(left, right))

    def at(places: Tensor) -> Tensor:
        samples = sound.index_select(-1, places.clamp(max=length - 1))
        return samples.where(places < length, 0)

    before = left - torch.arange(left, device=sound.device)
    after = length + torch.arange(right, device=sound.device)
    return torch.cat((at(before), sound, at(torch.minimum(after, 2 * last - after))), -1)


def encodec_convolution(self: Any, hidden_states: Tensor) -> Any:
    """EnCodec's convolution, of sound of any length."""
    hidden_states = self.conv(_padded(self, hidden_states))
    return self.norm(hidden_states) if self.norm_type == "time_group_norm" else hidden_states


def mimi_convolution(self: Any, hidden_states: Tensor, padding_cache: Any = None) -> Any:
    """Mimi's convolution, of sound of any length."""
    return self.conv(_padded(self, hidden_states))


def encode(
    self: Any,
    input_values: Tensor,
    padding_mask: Tensor | None = None,
    bandwidth: float | None = None,
    return_dict: bool | None = None,
) -> Any:
    """EnCodec's codes of whole sounds; transformers takes them as one chunk in a loop over chunks.

    Args:
        input_values: [batch, channels, samples].
        padding_mask: 0 for samples that become 0, [batch, samples] or [batch, channels, samples].
        bandwidth: One of the configuration's bandwidths; by default the first.
        return_dict: As transformers' own.

    Returns:
        Codes [1, batch, codebooks, frames], a list of one scale [batch, 1] or None, and 0.

    Raises:
        ValueError: The model has no such bandwidth, or takes other channels.
    """
    bandwidths, channels = self.config.target_bandwidths, input_values.shape[1]
    bandwidth = bandwidths[0] if bandwidth is None else bandwidth
    if bandwidth not in bandwidths:
        raise ValueError(f"The model has no bandwidth {bandwidth}, but {bandwidths}.")
    if channels < 1 or channels > 2:
        raise ValueError(f"EnCodec takes 1 or 2 channels, and got {channels}.")
    if padding_mask is not None:
        padding_mask = padding_mask.view(padding_mask.shape[0], -1, padding_mask.shape[-1])
        input_values = padding_mask.bool() * input_values
    codes, scale = self._encode_frame(input_values, bandwidth)
    results = codes[None], [scale], 0
    if not (self.config.return_dict if return_dict is None else return_dict):
        return results
    return modeling_of(self).EncodecEncoderOutput(*results)


def decode(
    self: Any,
    audio_codes: Tensor,
    audio_scales: Any,
    padding_mask: Tensor | None = None,
    return_dict: bool | None = None,
    last_frame_pad_length: Any = 0,
) -> Any:
    """EnCodec's sounds of codes, cut to the padding's length; transformers branches on whether they are longer.

    Args:
        audio_codes: [1, batch, codebooks, frames].
        audio_scales: One scale [batch, 1] or None.
        padding_mask: Its last axis has the greatest length of a sound.
        return_dict: As transformers' own.
        last_frame_pad_length: The number of last frames that are left out.

    Returns:
        [batch, channels, samples].

    Raises:
        ValueError: There are several chunks.
    """
    if audio_codes.shape[0] != 1:
        raise ValueError(f"The model takes sounds as one chunk, and got {audio_codes.shape[0]}.")
    codes = audio_codes[0]
    if last_frame_pad_length > 0:
        codes = codes[..., :-last_frame_pad_length]
    sound = self._decode_frame(codes, audio_scales[0])
    if padding_mask is not None:
        sound = sound.narrow(-1, 0, torch.sym_min(padding_mask.shape[-1], sound.shape[-1]))
    if not (self.config.return_dict if return_dict is None else return_dict):
        return (sound,)
    return modeling_of(self).EncodecDecoderOutput(sound)


def _has_chunks(self: Any, *_: Any, **__: Any) -> bool:
    return self.config.chunk_length is not None


def _is_of_chunks(self: Any, audio_codes: Any, *_: Any, **__: Any) -> bool:
    return _has_chunks(self) or not isinstance(audio_codes, Tensor)


def _has_cache(self: Any, hidden_states: Tensor, padding_cache: Any = None) -> bool:
    return padding_cache is not None


@contextlib.contextmanager
def dynamic_sizes() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged(
        {
            "torch_int": (torch_int, _is_plain),
            "torch_float": (torch_float, _is_plain),
            "MobileViTLayer.unfolding": (unfolding, _is_of_known_size),
            "EncodecConv1d.forward": (encodec_convolution, _has_cache),
            "EncodecModel.encode": (encode, _has_chunks),
            "EncodecModel.decode": (decode, _is_of_chunks),
            "MimiConv1d.forward": (mimi_convolution, _has_cache),
            "PocketTTSAudioTokenizerConv1d.forward": (mimi_convolution, _has_cache),
        }
    ):
        yield
