"""Captures without one of the patches of torch; ``-p tests.support.patches`` with the variable does so in a run of pytest."""

from __future__ import annotations

import os

import pytest

from onnxplug.capture import patches

VARIABLE = "ONNXPLUG_TEST_WITHOUT_PATCH"


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Leaves a patch out until the end of a test."""
    monkeypatch.setattr(patches, "PATCHES", others(name))


def others(name: str) -> tuple[patches.TorchPatch, ...]:
    """All patches but one."""
    found = tuple(patch for patch in patches.PATCHES if patch.name != name)
    assert len(found) == len(patches.PATCHES) - 1
    return found


if VARIABLE in os.environ:
    patches.PATCHES = others(os.environ[VARIABLE])
