"""Defines torch_scatter's and pyg_lib's operators by ``kernels.py`` where the packages aren't installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

# By path, under a name of its own: another package's tests may have a module of kernels, too.
_spec = importlib.util.spec_from_file_location("onnxplug_scatter_kernels", Path(__file__).with_name("kernels.py"))
assert _spec is not None
assert _spec.loader is not None
_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_kernels)
# Before tests are collected, which makes the samples.
_kernels.define()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
