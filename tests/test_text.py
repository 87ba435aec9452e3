"""Words of messages, and where they stand."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

import onnxplug
from onnxplug.errors import OutputMismatchError
from onnxplug.text import counted, type_with_article, value_text, with_article


@pytest.mark.parametrize(("count", "text"), [(0, "0 results"), (1, "1 result"), (2, "2 results")])
def test_counted(count: int, text: str) -> None:
    assert counted(count, "result") == text


@pytest.mark.parametrize(
    ("article", "nouns"),
    [
        (
            "a",
            [
                "list",
                "tuple",
                "Linear",
                "ResNet",
                "SiLU",
                "GPT2Model",
                "UNet",
                "uint8",
                "Unicorn",
                "EulerSampler",
                "function",
            ],
        ),
        ("an", ["int", "ExportedProgram", "OnnxProgram", "Identity", "LSTM", "RNN", "MLP", "unknown", "attribute"]),
    ],
)
def test_with_article(article: str, nouns: list[str]) -> None:
    assert [with_article(noun) for noun in nouns] == [f"{article} {noun}" for noun in nouns]


def test_type_with_article() -> None:
    assert [type_with_article(item) for item in (1, 1.5, [], torch.nn.LSTM(1, 1))] == [
        "an int",
        "a float",
        "a list",
        "an LSTM",
    ]


def test_value_text() -> None:
    known = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", 3]))
    assert [value_text(v) for v in (known, ir.Value())] == ["int64[batch, 3]", "?[?]"]


def test_a_model_of_another_type_is_named_with_its_article() -> None:
    with pytest.raises(onnxplug.UsageError, match="can't export an int"):
        onnxplug.to_onnx(3, ())


def test_a_converter_with_too_few_results() -> None:
    rules = [onnxplug.Rule("aten::sort", lambda g, node: node.args[0])]
    with pytest.raises(OutputMismatchError, match="returned 1 result where torch has 2 results; at "):
        onnxplug.to_onnx(lambda x: x.sort(), (torch.randn(3),), rules=rules)
