"""Memory that a process keeps after many calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: In a process of its own: in the heap of thousands of tests, large tensors of changing sizes reuse no memory.
MEASURE = "from benchmarks.compile import memory_growth; print(memory_growth())"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_calls_of_changing_sizes_keep_no_memory() -> None:
    measured = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    assert float(measured.stdout.split()[-1]) < 20
