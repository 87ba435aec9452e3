"""Models with weights of every kind, and the ways to make them without numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import onnxplug
from onnxplug.torch_private import FakeTensorMode


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.unread = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 3).long().clamp(max=9)[..., 0]
        return self.head(self.inner(self.embedding(ids) * torch.tensor([1.0, 2.0, 3.0, 4.0])))


class Rotary(nn.Module):
    """A buffer that is computed, and that no checkpoint has."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / (100.0 ** (torch.arange(0, 4) / 4.0)), persistent=False)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x * self.frequencies) * self.scale


class Kinds(nn.Module):
    """Weights of other element types than float32."""

    complex: torch.Tensor
    mask: torch.Tensor
    levels: torch.Tensor
    eighths: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("complex", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("levels", torch.randint(-128, 127, (4, 4), dtype=torch.int8))
        self.register_buffer("eighths", torch.randn(4).to(torch.float8_e4m3fn))
        self.halves = nn.Parameter(torch.randn(4, dtype=torch.float16))
        self.brain = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.view_as_real(x * self.complex).sum(-1).masked_fill(self.mask, 2.0)
        y = y @ self.levels.float() + self.eighths.float() * self.halves.float()
        return y + x @ self.brain.float()


#: Makers of models that take float32 of shape [batch, 3, 4].
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5, bias=False)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 6, 2), nn.BatchNorm1d(6), nn.ConvTranspose1d(6, 2, 2)),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(4, 5, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "tied": Tied,
    "rotary": Rotary,
    "kinds": Kinds,
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def faked(make: Callable[[], nn.Module]) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make()


def by_context(make: Callable[[], nn.Module]) -> nn.Module:
    with onnxplug.fake_weights():
        return make()


WAYS = {"meta": on_meta, "fake": faked, "fake_weights": by_context}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, persistent or not."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer is not None}
    return {**module.state_dict(), **buffers}


@contextlib.contextmanager
def seeded(seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
