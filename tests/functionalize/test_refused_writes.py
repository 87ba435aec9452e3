"""Writes that no graph states: each is an error with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.releases import IS_29

REFUSED_VIEWS: dict[str, Callable[..., Any]] = {
    "t_": lambda x: [x.t_(), x + 1][1],
    "transpose_": lambda x: [x.transpose_(0, 1), x + 1][1],
    "unsqueeze_": lambda x: [x.unsqueeze_(0), x + 1][1],
    "squeeze_": lambda x: [x.squeeze_(1), x + 1][1],
}


@pytest.mark.parametrize("dynamic", [None, ({0: "n"},)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", REFUSED_VIEWS)
def test_an_input_whose_axes_are_changed_in_place_is_named(name: str, dynamic: Any) -> None:
    with pytest.raises(
        onnxplug.CaptureError, match=r"test_refused_writes\.py:\d+ changes the axes of (the input )?x\b"
    ) as e:
        onnxplug.to_onnx(REFUSED_VIEWS[name], (torch.randn(3, 1),), dynamic_shapes=dynamic)
    assert "x = x.t()" in str(e.value)


def test_a_buffer_whose_axes_are_changed_in_place_is_named() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.kept.t_()

    with pytest.raises(
        onnxplug.CaptureError, match=r"aten\.t_\.default at .*test_refused_writes\.py:\d+ changes the axes of b_kept"
    ):
        onnxplug.to_onnx(Turned(), (torch.randn(2, 4),))


#: torch 2.9 records the lines of modules' ``forward`` alone.
_PLACE = "unknown source" if IS_29 else r".*test_refused_writes\.py:\d+"
SHARED_LISTS: dict[str, Callable[..., Any]] = {
    "twice": lambda y: torch._foreach_add_([y, y], 1.0),
    "overlapping": lambda y: torch._foreach_add_([y[:2], y[1:]], 1.0),
    "read by another": lambda y: torch._foreach_mul_([y[0], y[1]], [y[1], y[0]]),
}


@pytest.mark.parametrize("name", SHARED_LISTS)
def test_lists_of_tensors_that_share_memory_are_refused(name: str) -> None:
    with pytest.raises(
        onnxplug.CaptureError,
        match=rf"_foreach_\w+\.\w+ at {_PLACE} writes tensors that may share memory",
    ):
        onnxplug.to_onnx(lambda x: [y := x.clone(), SHARED_LISTS[name](y), y][-1], (torch.randn(3, 4),))
