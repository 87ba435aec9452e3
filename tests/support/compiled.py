"""The comparison of compiled models with eager models, and a model with results of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def leaves(value: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(value))


def compare(got: Any, expected: Any) -> None:
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(expected)
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        assert type(one) is type(other)
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, equal_nan=True)
            assert layout(one) == layout(other)
            assert one.requires_grad == other.requires_grad
        else:
            assert one == other


def layout(tensor: torch.Tensor) -> list[int]:
    """The strides of the axes longer than 1; none of an empty tensor."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


class Everything(nn.Module):
    """Mutates a buffer and an input; returns a view of an input, numbers, None and one tensor twice."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, k: int, scale: float) -> Any:
        self.calls += 1
        y = self.linear(x) * k * scale
        x.add_(1)
        return y, {"view": x[1:], "x": x, "transposed": y.t() * 2}, [y, None, x.shape[0] * 2, k, self.calls.clone()]


def tower(folder: str, seed: int) -> tuple[Any, torch.nn.Module]:
    """A model of this seed, compiled with a cache in a folder, and the model itself."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*[m for n in range(6) for m in (torch.nn.Linear(4 + n, 5 + n), torch.nn.Tanh())])
    return torch.compile(model, backend="onnxplug", options={"cache": folder, "fallback": False}), model
