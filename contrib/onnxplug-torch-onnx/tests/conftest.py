"""Fixtures of the tests of ``onnxplug.export``."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def vision() -> None:
    """Makes torchvision, timm and transformers' vision models importable (see tests/support/vision.py)."""
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()
