"""Views that are taken again after a write: they are the views that the model took."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.check import check


def axes_of_the_other_change_later(x: torch.Tensor) -> Any:
    y, z = x + 1, x * 2
    v = y.view_as(z)
    z.t_()
    w = v.reshape_as(z)
    z.unsqueeze_(0)
    y.add_(1)
    v.mul_(2)
    return y, v, z, w


def other_is_resized_later(x: torch.Tensor) -> Any:
    y, z = x + 1, x * 2
    v = y.reshape_as(z)
    z.resize_(2, 2)
    v.add_(1)
    return y, v, z


def test_axes_of_another_tensor_that_change_later() -> None:
    others = [(torch.randn(5, 4),), (torch.randn(1, 4) * 3,)]
    check(axes_of_the_other_change_later, torch.randn(3, 4), others=others, dynamic=({0: "n"},))


def test_another_tensor_that_is_resized_later() -> None:
    check(other_is_resized_later, torch.randn(3, 4), others=[(torch.randn(3, 4) * -2,), (torch.zeros(3, 4),)])


def parts_that_overlap(x: torch.Tensor) -> Any:
    y = x + 1
    a, b, c = y.tensor_split((3, -3), 1)
    a.add_(1)
    b.add_(10)
    c[:, 0] = 5
    y.hsplit((2, 1))[2].mul_(2)
    return y, a, b, c


def test_parts_that_overlap() -> None:
    check(
        parts_that_overlap, torch.randn(3, 4), others=[(torch.randn(7, 4),), (-torch.rand(1, 4),)], dynamic=({0: "n"},)
    )
