"""Recursive filters by ATen operators: products for blocks of samples, and a scan that carries the last samples on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.torch_private import scan

#: The number of samples that are computed together; the result is the same for any number.
BLOCK = 64


def lfilter_core_loop(input_signal_windows: Tensor, a_coeffs_flipped: Tensor, padded_output_waveform: Tensor) -> None:
    """``torchaudio::_lfilter_core_loop``, which writes ``padded_output_waveform`` behind its first ``order`` samples.

    Args:
        input_signal_windows: [batch, channels, T]
        a_coeffs_flipped: [channels, order + 1], the last column of which is 1.
        padded_output_waveform: [batch, channels, order + T], zeros.
    """
    order = a_coeffs_flipped.shape[1] - 1
    result = filtered(input_signal_windows, a_coeffs_flipped[:, :order].flip(1))
    padded_output_waveform[:, :, order:].copy_(result)


def overdrive_core_loop(
    waveform: Tensor, temp: Tensor, last_in: Tensor, last_out: Tensor, output_waveform: Tensor
) -> None:
    """``torchaudio::_overdrive_core_loop``, which writes ``output_waveform``: half the wave, and ``temp`` without its slow part.

    Args:
        waveform: [batch, T]
        temp: [batch, T], the distorted wave.
        last_in, last_out: [batch], zeros.
        output_waveform: [batch, T]
    """
    steps = temp - functional.pad(temp, (1, 0))[:, :-1]
    slow = filtered(steps.unsqueeze(1), steps.new_tensor([[-0.995]])).squeeze(1)
    output_waveform.copy_(waveform * 0.5 + slow * 0.75)


def filtered(x: Tensor, a: Tensor) -> Tensor:
    """``y[t] = x[t] - a[0] y[t - 1] - a[1] y[t - 2] - …`` of each channel, in float64.

    Args:
        x: [batch, channels, T]
        a: [channels, order]
    """
    order, length, batch, channels = a.shape[1], x.shape[2], x.shape[0], x.shape[1]
    if order == 0:
        return x.clone()
    size = max(BLOCK, order)
    count = length // size + 1
    after = _after(a.double(), size)
    # The part of a sample in the samples behind it, by lag; ``spread`` is [channels, size, size].
    impulse = torch.cat([after.new_zeros(channels, 1), after.new_ones(channels, 1), after[:, : size - 1, 0]], 1)
    lags = torch.arange(size, device=x.device)
    spread = impulse[:, (lags - lags[:, None] + 1).clamp(min=0)]
    blocks = functional.pad(x.double(), (0, count * size - length)).unflatten(2, (count, size))
    own = (blocks @ spread).permute(2, 0, 1, 3)
    after = after.mT

    def step(last: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        result = block + (last.unsqueeze(2) @ after).squeeze(2)
        return result.narrow(2, size - order, order).flip(2), result.clone()

    first = torch.zeros((batch, channels, order), dtype=torch.float64, device=x.device)
    _, results = scan(step, first, own.contiguous())
    return results.permute(1, 2, 0, 3).flatten(2).narrow(2, 0, length).to(x.dtype)


def _after(a: Tensor, size: int) -> Tensor:
    """The weights of the last samples before a block in the block's, [channels, size, order], the newest first."""
    channels, order = a.shape
    shift = torch.eye(order, dtype=a.dtype, device=a.device)[: order - 1].expand(channels, -1, -1)
    power = torch.cat([-a.unsqueeze(1), shift], 1)
    rows = -a.unsqueeze(1)
    while rows.shape[1] < size:
        rows, power = torch.cat([rows, rows @ power], 1), power @ power
    return rows[:, :size]
