"""Words of messages, and where they stand."""

from __future__ import annotations

import pytest
import torch

import onnxplug
from onnxplug.errors import OutputMismatchError
from onnxplug.text import counted


@pytest.mark.parametrize(("count", "text"), [(0, "0 results"), (1, "1 result"), (2, "2 results")])
def test_counted(count: int, text: str) -> None:
    assert counted(count, "result") == text


def test_a_converter_with_too_few_results() -> None:
    rules = [onnxplug.Rule("aten::sort", lambda g, node: node.args[0])]
    with pytest.raises(OutputMismatchError, match="returned 1 result where torch has 2 results; at "):
        onnxplug.to_onnx(lambda x: x.sort(), (torch.randn(3),), rules=rules)
