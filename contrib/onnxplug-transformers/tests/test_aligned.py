"""PE Audio-Video: a video's frames, aligned to the places of its sound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug


class _Aligns(nn.Module):
    """The method of a part of the model that aligns; it uses nothing of the part."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.pe_audio_video import modeling_pe_audio_video

        self.part: Any = modeling_pe_audio_video.PeAudioVideoEncoderEmbedder

    def forward(self, video: Tensor, sound: Tensor, of_video: Any = None, of_sound: Any = None) -> Tensor:
        aligned: Tensor = self.part._align_video_hidden_state(self, video, sound, of_video, of_sound)
        return aligned


def _case(batch: int, frames: int, places: int, masks: str) -> dict[str, Tensor]:
    """Masks of any lengths; those of ``whole`` videos leave out nothing."""
    case = {"video": torch.randn(batch, frames, 3), "sound": torch.randn(batch, places, 2)}
    if masks != "none":
        case["of_video"] = torch.arange(frames) < torch.randint(0, frames + 1, (batch, 1))
        case["of_sound"] = torch.arange(places) < torch.randint(0, places + 1, (batch, 1))
    if masks == "whole":
        case["of_video"] = torch.ones_like(case["of_video"])
    return case


@pytest.mark.parametrize("masks", ["none", "some", "whole"])
def test_any_lengths(masks: str) -> None:
    """Videos that are shorter, longer and as long as their sounds."""
    torch.manual_seed(0)
    example = _case(2, 5, 9, masks)
    lengths = {"video": "frames", "sound": "places", "of_video": "frames", "of_sound": "places"}
    dynamic = {name: {0: "batch", 1: lengths[name]} for name in example}
    program = onnxplug.to_onnx(_Aligns(), kwargs=example, dynamic_shapes=dynamic)
    for batch, frames, places in ((2, 5, 9), (1, 1, 1), (3, 7, 7), (4, 12, 6), (5, 3, 31), (1, 1, 4)):
        program.verify(kwargs=_case(batch, frames, places, masks), seeds=(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_alignment_is_that_of_transformers(dtype: torch.dtype) -> None:
    from onnxplug_transformers.aligned import align

    torch.manual_seed(0)
    model = _Aligns()
    for frames in (1, 2, 3, 7, 13, 28, 200):
        for places in (1, 2, 5, 7, 14, 39, 211):
            for masks in ("none", "some", "whole"):
                case = _case(3, frames, places, masks)
                given = [case["video"].to(dtype), case["sound"].to(dtype), case.get("of_video"), case.get("of_sound")]
                for chosen in (given, [*given[:3], None], [*given[:2], None, given[3]]):
                    torch.testing.assert_close(align(model, *chosen), model(*chosen), rtol=0, atol=0)


def test_padding_is_ignored_where_lengths_are_those_of_the_other() -> None:
    """All sounds have as many places as the tensor of videos, though the videos have fewer frames, and the other way round."""
    from onnxplug_transformers.aligned import align

    torch.manual_seed(0)
    video, sound = torch.randn(2, 4, 3), torch.randn(2, 9, 2)
    of_video = torch.arange(4) < torch.tensor([[2], [3]])
    of_sound = (torch.arange(9) < 4).expand(2, -1)
    longer = torch.randn(2, 12, 3), (torch.arange(12) < 9).expand(2, -1)
    same = torch.randn(2, 9, 3), torch.arange(9) < torch.tensor([[2], [3]])
    for case in (
        (video, sound, of_video, of_sound),
        (longer[0], sound, longer[1], None),
        (same[0], sound, same[1], None),
    ):
        torch.testing.assert_close(align(None, *case), _Aligns()(*case), rtol=0, atol=0)
