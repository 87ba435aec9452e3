"""Defines xformers' operator by the package where the library isn't installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from onnxplug_xformers import library, stand_in

if importlib.util.find_spec("xformers") is None:
    library.define()
else:
    stand_in()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
