"""Comparisons that ONNX Runtime takes no part in are counted, and shown at the end of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.child import run_fork

_TESTS = """
import torch
import torch.nn.functional as F

from tests.support.check import check

X = torch.randn(1, 2, 6)


def test_doubles():
    check(lambda x: F.conv1d(x, x[:, :, :2]), X.double(), others=[(X.double() * 2,)])


def test_floats():
    check(lambda x: F.conv1d(x, x[:, :, :2]), X)
"""


@pytest.mark.long
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "a worker"])
def test_results_of_an_evaluator_are_counted(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS, encoding="utf-8")
    command = ["-m", "pytest", "-q", "-p", "tests.conftest", "-W", "ignore", *workers, "."]
    path = [str(Path(__file__).parents[1]), *sys.path]
    run = run_fork(*command, cwd=tmp_path, env=_with_path(path))
    assert "2 passed" in run.stdout, run.stdout + run.stderr
    assert "2 results were compared with " in run.stdout
    assert "as ONNX Runtime has no kernel" in run.stdout


def _with_path(path: list[str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p)}
