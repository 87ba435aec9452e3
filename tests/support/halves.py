"""Small models of each kind, to be run in 16-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


class Block(torch.nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def transformer() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """A block, its inputs, and which of their sizes are dynamic."""
    return Block(), (torch.randn(2, 5, 32),), ({0: "batch", 1: "steps"},)


def convolutional() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """A small network of convolutions, pools and a classifier."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, stride=2),
        torch.nn.SiLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 5),
        torch.nn.Softmax(-1),
    )
    return model, (torch.randn(2, 3, 16, 16),), ({0: "batch"},)


def perceptron() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """Three linear layers."""
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)]
    return torch.nn.Sequential(*layers), (torch.randn(3, 8),), ({0: "batch"},)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]]] = {
    f.__name__: f for f in (transformer, convolutional, perceptron)
}
