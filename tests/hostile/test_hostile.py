"""Every bad input has one clear answer (``case.py`` describes a case, ``worker.py`` the demands on the answer)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.worker import cases

CASES = cases()
#: One of this many cases is in the default run, chosen by their names.
SAMPLED = 24
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen[str]]:
    """The process that forks for each case."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.hostile.worker", "--serve"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if zlib.crc32(n.encode()) % SAMPLED == 0 else [pytest.mark.long]) for n in CASES],
)
def test_a_bad_input_has_one_clear_answer(worker: subprocess.Popen[str], name: str) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{name}\n")
    worker.stdin.flush()
    answer = json.loads(worker.stdout.readline())
    assert answer["problems"] == [], f"{answer['message']}\n{answer['stderr']}"
