"""Captures without a patch of torch; ``-p tests.support.patches`` and the variable do so in a run of pytest."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

from onnxplug.capture import patches
from onnxplug.patches import table

VARIABLE = "ONNXPLUG_TEST_WITHOUT_PATCH"
PATCHES = (*patches.PATCHES, *table.PATCHES)


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Leaves a patch out until the end of a test."""
    home = _home(name)
    monkeypatch.setattr(home, "PATCHES", _others(home, name))


def _home(name: str) -> ModuleType:
    """The table that has a patch."""
    (home,) = (home for home in (patches, table) if any(patch.name == name for patch in home.PATCHES))
    return home


def _others(home: ModuleType, name: str) -> tuple[patches.TorchPatch, ...]:
    return tuple(patch for patch in home.PATCHES if patch.name != name)


if VARIABLE in os.environ:
    _home(os.environ[VARIABLE]).PATCHES = _others(_home(os.environ[VARIABLE]), os.environ[VARIABLE])  # type: ignore[attr-defined]
