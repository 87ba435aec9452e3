"""Defines flash_attn's operators by the package where the library isn't installed."""

from __future__ import annotations

import pytest
import torch
from onnxplug_flash_attn.functions import define

define()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
