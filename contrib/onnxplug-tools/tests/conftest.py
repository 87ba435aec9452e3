"""Fixtures that the tests of the package share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def forked_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bisect` tries its scripts in forks of a process that has imported torch, not in new interpreters."""
    from tests.support.child import run_fork

    def run(command: list[str], *, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        return run_fork(*command[1:], env=dict(os.environ), cwd=cwd)

    instead = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("onnxplug_tools.diagnosis.bisect.subprocess", instead)
