"""Defines causal_conv1d's operators by the package where the library isn't installed."""

from __future__ import annotations

import pytest
import torch
from onnxplug_mamba import stand_in

stand_in()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
