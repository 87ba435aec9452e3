"""The operators' samples."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.onnxplug("mmcv")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()
