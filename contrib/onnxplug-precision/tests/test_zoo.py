"""The models of the benchmarks in half precision: each is loaded and runs, within the tolerances of float16."""

from __future__ import annotations

import pytest

import onnxplug
from benchmarks.consumers import MODELS


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    case = MODELS[name]()
    program = onnxplug.to_onnx(
        case.module, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes, dtype="float16"
    )
    program.verify(seeds=(0,))
    assert program.precision.bytes_after < 0.52 * program.precision.bytes_before or program.precision.bytes_before < 1e4
    assert min(item.cosine for item in program.precision.accuracy) > 0.9999
