"""Defines the operators by the package where the libraries aren't installed."""

from __future__ import annotations

import pytest
import torch
from onnxplug_vllm import stand_in

stand_in()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
