"""The comparison of exported programs with eager kornia."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., onnxplug.OnnxProgram]:
    """A function of a model, lists of inputs, of which the first is the example, and dynamic sizes: the program agrees on all.

    Of equal scores torch's unstable sort has any first, a file the first: eager kornia gets the stable sort.
    """
    sort = torch.Tensor.sort

    def compare(model: Any, inputs: Any, dynamic_shapes: Any = None, **tolerances: float) -> onnxplug.OnnxProgram:
        inputs = list(inputs)
        program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=dynamic_shapes)
        for args in inputs:
            with torch.no_grad(), monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "sort", lambda x, *a, **options: sort(x, *a, **{**options, "stable": True}))
                expected = model(*(x.clone() for x in args))
            expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
            torch.testing.assert_close(list(program(*args)), expected, equal_nan=True, check_dtype=False, **tolerances)
        return program

    return compare
