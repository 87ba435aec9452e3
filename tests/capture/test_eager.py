"""Eager runs that leave no trace."""

from __future__ import annotations

import threading

import pytest
import torch

from onnxplug.capture.eager import inference


@pytest.mark.parametrize("before", [True, False])
def test_threads_leave_settings_as_they_were(before: bool) -> None:
    """The second thread begins while the first has changed them, and ends after it."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    within = []

    def first() -> None:
        with inference():
            first_in.set()
            assert second_in.wait(10)
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        with inference():
            second_in.set()
            assert first_out.wait(10)
            within.append((torch.backends.mha.get_fastpath_enabled(), torch.get_float32_matmul_precision()))

    precision = "highest" if before else "medium"
    kept = torch.backends.mha.get_fastpath_enabled(), torch.get_float32_matmul_precision()
    torch.backends.mha.set_fastpath_enabled(before)
    torch.set_float32_matmul_precision(precision)
    try:
        threads = [threading.Thread(target=target) for target in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert torch.backends.mha.get_fastpath_enabled() is before
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.backends.mha.set_fastpath_enabled(kept[0])
        torch.set_float32_matmul_precision(kept[1])
    assert within == [(False, "highest")]
