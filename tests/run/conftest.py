"""Fixtures of the tests of running and saving."""

from __future__ import annotations

import pytest

import onnxplug
from tests.run.saved import program


@pytest.fixture(scope="session")
def programs() -> tuple[onnxplug.OnnxProgram, onnxplug.OnnxProgram]:
    return program(1.0), program(2.0)
