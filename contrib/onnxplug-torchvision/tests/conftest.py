"""Fixtures of these tests. Where torchvision's compiled kernels are absent, the checkout's kernels replace them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

with contextlib.suppress(ImportError):
    from tests.support.vision_kernels import define_vision_kernels

    define_vision_kernels()


@pytest.fixture(autouse=True)
def _ready() -> Iterator[None]:
    """Loads torchvision's operators, and seeds the random numbers."""
    import torchvision  # noqa: F401

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def agrees(onnx_check: Callable[..., Any]) -> Callable[..., Any]:
    """`onnx_check` with torch.testing's tolerances of float32, on the given inputs alone.

    Random inputs would be regions of images that are not in the batch.
    """
    return partial(onnx_check, seeds=(), optimize=(True,), rtol=1.3e-6, atol=1e-5)
