"""Memory that a process keeps after many calls."""

from __future__ import annotations

import sys

import pytest

from benchmarks.compile import memory_growth


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_calls_of_changing_sizes_keep_no_memory() -> None:
    assert memory_growth() < 20
