"""The operator's samples."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.onnxplug("xformers")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()
