"""resize_: it changes how much of its memory a tensor takes, not the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onnxplug
from onnxplug.errors import CaptureError
from tests.support.check import Call, check


def shrunk_and_grown(x: torch.Tensor) -> torch.Tensor:
    return x.clone().resize_(3, 2).resize_(6, 6)


def shrunk_twice_and_grown(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.resize_(4)
    y.resize_(2, 1)
    return y.resize_(5, 6) + 1


def shrunk_written_and_shrunk(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.resize_(3, 2)
    y.add_(1)
    return y.resize_(2, 2) * 2


@pytest.mark.parametrize("function", [shrunk_and_grown, shrunk_twice_and_grown, shrunk_written_and_shrunk])
def test_resized_again(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Elements that a resize_ left out are there again after a later one."""
    x = torch.arange(36.0).reshape(6, 6)
    check(function, x, others=[(x * -3 + 1,)])


def test_resized_again_after_a_write() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        y = x.clone().resize_(3, 2)
        y.add_(1)
        return y.resize_(6, 6)

    with pytest.raises(CaptureError, match="makes a tensor larger that was made smaller and written before"):
        onnxplug.to_onnx(Call(written), (torch.randn(6, 6),))
