"""``len(x)`` of a tensor is a dynamic size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check


class _Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = len(x)
        rows = [x.new_full((batch, 2), float(len([1, 2])))]
        return torch.cat([x.reshape(batch, -1), *rows], 1) * len(x.shape)


@pytest.mark.parametrize("strict", [None, True])
def test_length_of_a_tensor(strict: bool | None) -> None:
    others = [(torch.randn(5, 2, 3),), (torch.randn(1, 2, 3),)]
    program = check(_Model(), torch.randn(3, 2, 3), others=others, dynamic=({0: "batch"},), strict=strict)
    assert program.captured.strategy.startswith("strict" if strict else "non-strict")
    assert "len" not in globals()


def test_length_in_a_function() -> None:
    check(lambda x: x / len(x), torch.randn(4), others=[(torch.randn(7),), (torch.randn(1),)], dynamic=({0: "n"},))


def test_a_loop_over_a_length_fixes_the_size() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[i] * i for i in range(len(x))])

    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(model, (torch.randn(3, 2),), dynamic_shapes=({0: "n"},))
    check(model, torch.randn(3, 2), others=[(torch.randn(3, 2),)])
    assert "len" not in globals()
