"""Models with their losses, and data to train them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Data = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class Recurrent(nn.Module):
    """A language model: embedding, recurrent layers, layer norm, cross entropy."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU | nn.RNN], **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layer = layer(8, 12, batch_first=True, **settings)
        width = 24 if self.layer.bidirectional else 12
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result = self.head(self.norm(self.layer(self.embedding(ids))[0]))
        return F.cross_entropy(result.flatten(0, 1), targets.flatten())


class Convolutional(nn.Module):
    """An image classifier: convolutions, batch and group norm, pools, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(16, 5),
        )

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(images), targets, label_smoothing=0.1)


class Transformer(nn.Module):
    """A causal language model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16, padding_idx=0)
        self.places = nn.Parameter(torch.randn(12, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 30)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        result = self.head(self.layers(x, mask=mask, is_causal=True))
        return F.cross_entropy(result.flatten(0, 1), targets.flatten(), ignore_index=0)


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 20, (4 + step % 3, 6))
    return ids, (ids * 3) % 20


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.randint(0, 5, (8 + step % 3,))
    return torch.randn(len(targets), 3, 16, 16) + targets[:, None, None, None] * 0.5, targets


MODELS: dict[str, tuple[Callable[[], nn.Module], Data]] = {
    "lstm": (lambda: Recurrent(nn.LSTM), text),
    "gru, two directions": (lambda: Recurrent(nn.GRU, bidirectional=True), text),
    "rnn": (lambda: Recurrent(nn.RNN), text),
    "cnn": (Convolutional, images),
    "transformer": (Transformer, text),
}
