"""Arguments in a few words, without their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.report.arguments import in_words, model_name, summarised

import onnxplug
from onnxplug import Rule


class Opaque:
    def __repr__(self) -> str:
        return "a secret"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor([[12345.0, 2.0]]), "float32[1, 2]"),
        (torch.tensor(77), "int64[]"),
        ((torch.zeros(2),), "(float32[2],)"),
        ({"x": [torch.zeros(2), None]}, "{'x': [float32[2], None]}"),
        (list(range(20)), f"[{', '.join(map(str, range(16)))}, … 4 more]"),
        ("a" * 400, f"'{'a' * 298}…"),
        (Path("a/b"), "'a/b'"),
        (Rule("aten::add", lambda g, node: None), "Rule('aten::add')"),
        (onnxplug.Metadata("full"), "Metadata(level='full', absolute_paths=False)"),
        (torch.nn.Linear, "Linear"),
        (torch.nn.Linear(2, 2), "Linear"),
        (len, "len"),
        (Opaque(), "Opaque"),
        ([[[[[[1]]]]]], "[[[[…]]]]"),
    ],
)
def test_in_words(value: Any, text: str) -> None:
    assert in_words(value) == text


def test_defaults_are_left_out() -> None:
    def call(model: Any, a: int = 1, b: Any = None, c: tuple[int, ...] = (), d: bool = True) -> None:
        pass

    options = {"a": 1, "b": torch.zeros(1), "c": (), "d": False, "progress": print}
    assert summarised(options, call) == {"b": "float32[1]", "d": "False"}


def test_names_of_models() -> None:
    assert model_name(torch.nn.ReLU()) == "torch.nn.modules.activation.ReLU"
    assert model_name(test_names_of_models) == f"{__name__}.test_names_of_models"
