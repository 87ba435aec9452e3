"""The model that conversion is timed on: a GPT-like decoder, attention written out by matmul and softmax."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) * size**-0.5
        weights = scores.masked_fill(mask[:length, :length] == 0, float("-inf")).softmax(-1)
        return self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a GELU MLP, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm2(x))))


class Decoder(nn.Module):
    """A GPT-like decoder.

    Args:
        layers: Number of blocks.
        width, heads, vocabulary, longest: Sizes; small, as conversion costs the same at any.
    """

    def __init__(
        self, layers: int, width: int = 64, heads: int = 4, vocabulary: int = 100, longest: int = 1024
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def exported_decoder(layers: int) -> torch.export.ExportedProgram:
    """The decoder captured with dynamic batch and sequence."""
    torch.manual_seed(0)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("sequence", max=1000)
    ids = torch.randint(0, 100, (2, 8))
    with torch.no_grad():
        return torch.export.export(Decoder(layers).eval(), (ids,), dynamic_shapes=({0: batch, 1: length},))
