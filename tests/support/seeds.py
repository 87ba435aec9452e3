"""Common parts of the conftests of the tests and of contrib: the same random numbers in every run, and torchvision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The numbers that a module of tests draws as it is imported are the same in every run."""
    if isinstance(collector, pytest.Module):
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """In every test, random numbers of torch and NumPy start at seed 0, and are put back afterwards."""
    import numpy as np
    import torch

    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback for each kind of accelerator
        np.random.seed(0)
        yield
    np.random.set_state(state)


@pytest.fixture
def vision() -> None:
    """Makes torchvision, timm and transformers' vision models importable (see tests/support/vision.py)."""
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()
