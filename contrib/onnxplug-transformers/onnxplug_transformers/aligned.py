"""Frames of videos aligned to the places of their sounds, while a model is captured.

PE Audio-Video stretches each video's frames to the number of its sound's places, in a loop over the batch, and branches
on both lengths. Here the index of each place's frame is computed, and the frames are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug_transformers.exchanged import exchanged, never


@contextlib.contextmanager
def frames_aligned_at_once() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged({"PeAudioVideoEncoderEmbedder._align_video_hidden_state": (align, never)}):
        yield


def align(
    self: Any,
    video_hidden_state: Tensor,
    audio_hidden_state: Tensor,
    padding_mask_videos: Tensor | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The nearest of a video's frames for each place of its sound; after the sound's last place, zeros.

    Padding is ignored where both tensors have the same length, or where all lengths by the mask of one are the length
    of the other tensor.

    Args:
        video_hidden_state: [batch, frames, width].
        audio_hidden_state: [batch, places, width of sounds].
        padding_mask_videos: 1 for frames that are no padding, [batch, frames].
        padding_mask: 1 for places that are no padding, [batch, places].

    Returns:
        [batch, places, width].
    """
    places, width = audio_hidden_state.shape[1], video_hidden_state.shape[2]
    of_videos, of_sounds = _lengths(padding_mask_videos, video_hidden_state), _lengths(padding_mask, audio_hidden_state)
    all_frames, all_places = _lengths(None, video_hidden_state), _lengths(None, audio_hidden_state)
    is_whole = (of_sounds == all_frames).all() | (of_videos == all_places).all() | (all_frames == all_places).all()
    of_videos, of_sounds = of_videos.where(~is_whole, all_frames), of_sounds.where(~is_whole, all_places)
    # As in torch's interpolation: computed in the states' precision, but at least float32, and rounded down as float32.
    precision = torch.promote_types(video_hidden_state.dtype, torch.float32)
    numbers = torch.arange(places, device=video_hidden_state.device)
    ratio = of_videos.to(precision) / of_sounds.clamp(min=1).to(precision)
    chosen = (numbers.to(precision) * ratio[:, None]).float().floor().long()
    chosen = chosen.minimum(of_videos[:, None] - 1).clamp(min=0)
    aligned = video_hidden_state.gather(1, chosen[:, :, None].expand(-1, -1, width))
    is_there = (numbers < of_sounds[:, None]) & (of_videos > 0)[:, None]
    return aligned.where(is_there[:, :, None], 0)


def _lengths(mask: Tensor | None, states: Tensor) -> Tensor:
    """The number of valid places of each row, [batch]: the sum of a mask, or the size of the states' second axis."""
    if mask is None:
        return torch.full((states.shape[0],), states.shape[1], dtype=torch.int64, device=states.device)
    return mask.sum(-1)
