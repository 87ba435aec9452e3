"""Settings and fixtures for every test."""

from __future__ import annotations

import os

# Before torch is imported, here or in a worker of pytest-xdist: one thread a worker, no look-ups on a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests see the plugins they ask for, not those of the developer's shell.
os.environ.pop("ONNXPLUG_PLUGINS", None)
os.environ.pop("ONNXPLUG_METADATA", None)

import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxplug.testing import plugin as onnxplug_fixtures


def pytest_configure(config: pytest.Config) -> None:
    """The fixtures of `onnxplug.testing`, also where this checkout was installed before it had its entry point."""
    if not config.pluginmanager.is_registered(onnxplug_fixtures):
        config.pluginmanager.register(onnxplug_fixtures, "onnxplug")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The numbers that a module of tests draws as it is imported are the same in every run."""
    if isinstance(collector, pytest.Module):
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _shape_warnings() -> Iterator[None]:
    """ONNX Runtime's warnings go to stderr."""
    from onnxplug.testing.warnings import shape_warnings

    with shape_warnings():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every test fails where ONNX Runtime warns that a shape in the model is wrong."""
    from onnxplug.testing.warnings import fail_on_shape_warnings

    report = yield
    fail_on_shape_warnings(report)
    return report


@pytest.fixture
def vision() -> None:
    """Makes torchvision, timm and transformers' vision models importable (see tests/support/vision.py)."""
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """In every test, random numbers of torch and NumPy start at seed 0, and are put back afterwards."""
    import numpy as np
    import torch

    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        np.random.seed(0)
        yield
    np.random.set_state(state)


@pytest.fixture
def forked_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bisect` tries its scripts in forks of a process that has imported torch, not in new interpreters."""
    from tests.support.child import run_fork

    def run(command: list[str], *, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        return run_fork(*command[1:], env=dict(os.environ), cwd=cwd)

    instead = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("onnxplug.diagnosis.bisect.subprocess", instead)
