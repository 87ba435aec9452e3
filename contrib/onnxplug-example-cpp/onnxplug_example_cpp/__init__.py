"""The operator leaky_sum for PyTorch, in C++. Its ONNX translation is in :mod:`onnxplug_example_cpp.plugin`."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["leaky_sum"]

torch.ops.load_library(str(Path(__file__).with_name("libexample_torch.so")))


@torch.library.register_fake("example_cpp::leaky_sum")
def _(x: torch.Tensor, leak: float) -> torch.Tensor:
    torch._check(x.dim() > 0, lambda: "leaky_sum: x needs at least one dimension")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def leaky_sum(x: torch.Tensor, leak: float) -> torch.Tensor:
    """A running sum along the last dimension that forgets: ``y[t] = x[t] + leak * y[t - 1]``."""
    return torch.ops.example_cpp.leaky_sum(x, leak)
