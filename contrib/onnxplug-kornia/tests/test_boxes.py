"""kornia's non-maximum suppression as a user calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onnxplug

pytest.importorskip("kornia")

from kornia.geometry.bbox import nms

DYNAMIC = ({0: "boxes"}, {0: "boxes"})


def drawn(count: int) -> tuple[Tensor, Tensor]:
    """Boxes with whole corners and scores that are often equal."""
    corners = torch.randint(0, 30, (count, 2))
    return torch.cat([corners, corners + torch.randint(1, 12, (count, 2))], 1).float(), torch.randint(
        0, 9, (count,)
    ) / 9


def boxes() -> Iterator[tuple[Tensor, Tensor]]:
    for count in (40, 0, 1, 2, 17, 300):
        yield drawn(count)
    same, scores = drawn(1)
    yield same.expand(20, 4), scores.expand(20)
    empty, scores = drawn(30)  # two empty boxes, whose overlap is 0 / 0
    empty[::3, 2:] = empty[::3, :2]
    yield empty, scores
    yield empty.flip(1), scores  # corners in the other order
    unknown, scores = drawn(30)
    unknown[4, 1], unknown[9] = float("nan"), float("inf")
    yield unknown, scores
    yield drawn(30)[0], torch.where(scores > 0.7, float("nan"), scores)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 1.5, -0.5])
def test_nms(compare: Callable[..., Any], threshold: float) -> None:
    compare(lambda boxes, scores: nms(boxes, scores, threshold), boxes(), DYNAMIC)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_dtypes(compare: Callable[..., Any], dtype: torch.dtype) -> None:
    inputs = [(corners.to(dtype), scores) for corners, scores in map(drawn, (40, 1, 200))]
    compare(lambda boxes, scores: nms(boxes, scores, 0.25), inputs, DYNAMIC)


def test_refused() -> None:
    for corners, scores in ((torch.zeros(3, 5), torch.zeros(3)), (torch.zeros(3, 4), torch.zeros(3, 1))):
        with pytest.raises(onnxplug.OnnxplugError, match="expected as N"):
            onnxplug.to_onnx(lambda boxes, scores: nms(boxes, scores, 0.5), (corners, scores))
