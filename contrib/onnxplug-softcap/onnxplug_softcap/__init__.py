"""The operator softcap for PyTorch. Its ONNX translation is in :mod:`onnxplug_softcap.plugin`."""

from __future__ import annotations

import torch

__all__ = ["softcap"]


@torch.library.custom_op("softcap::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)``: x limited smoothly to ±cap."""
    return cap * torch.tanh(x / cap)


@softcap.register_fake
def _(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.empty_like(x)
