"""Tensors without numbers: those on the device ``meta``, and fake ones."""

from __future__ import annotations

from typing import Any

import torch

from onnxplug.torch_private import FakeTensor


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape and a dtype, and no numbers."""
    return isinstance(tensor, FakeTensor) or (isinstance(tensor, torch.Tensor) and tensor.is_meta)
