"""The samples of the package's own operator, by ONNX Runtime's MoE and written out."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.onnxplug("ort")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()
