"""The operators' samples."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


@pytest.mark.onnxplug("mmcv")
def test_sample(onnx_sample: Any) -> None:
    if "mmdeploy" in onnx_sample.domains and find_spec("mmdeploy") is None:
        pytest.skip("mmdeploy, whose library runs these operators, is not installed")
    onnx_sample.check()
