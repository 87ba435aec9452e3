"""Tensors of strings: as inputs, results and constants of exported models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import onnxplug
from onnxplug import string_array, string_tensor

TEXTS = ["", "one", "zwei", "三", "emoji 😀", "with\0zero", "one"]


@torch.library.custom_op("test_strings::exclaim", mutates_args=())
def exclaim(texts: torch.Tensor, mark: str) -> torch.Tensor:
    return string_tensor(string_array(texts) + mark)


@torch.library.custom_op("test_strings::first", mutates_args=())
def first(texts: torch.Tensor) -> torch.Tensor:
    return texts[:1].clone()


exclaim.register_fake(lambda texts, mark: torch.empty_like(texts))
first.register_fake(lambda texts: texts.new_empty((1,)))


def convert_exclaim(g: Any, node: Any) -> Any:
    texts, mark = node.args
    return g.op.StringConcat(texts, g.const(mark))


def convert_first_wrongly(g: Any, node: Any) -> Any:
    return g.op.Slice(node.args[0], [1], [2])


RULES = [
    onnxplug.Rule("test_strings::exclaim", convert_exclaim),
    onnxplug.Rule("test_strings::first", convert_first_wrongly),
]


@pytest.mark.parametrize("texts", [TEXTS, [], "alone", [["a", "b"], ["c", ""]], np.array(["a", "bc"])])
def test_there_and_back(texts: Any) -> None:
    array = string_array(string_tensor(texts))
    np.testing.assert_array_equal(array, np.array(texts, dtype=object))
    assert array.dtype == object


def test_refused_arguments() -> None:
    with pytest.raises(onnxplug.UsageError, match="5 is no string"):
        string_tensor(["a", 5])
    texts = string_tensor(["a", "b"])
    with pytest.raises(NotImplementedError):
        texts + texts
    with pytest.raises(onnxplug.Unsupported, match="bits seen as another dtype"):
        onnxplug.to_onnx(lambda x: x.view(torch.int16), (texts,))


def test_more_strings_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug import strings

    known = string_tensor("known")
    monkeypatch.setattr(strings, "_MOST", len(strings._strings))
    assert string_array(string_tensor(["known"]))[0] == string_array(known).item() == "known"
    with pytest.raises(onnxplug.UsageError, match="different strings"):
        string_tensor("a string that no test has")


def test_movement_and_operators(onnx_check: Callable[..., Any]) -> None:
    class Model(torch.nn.Module):
        def forward(self, texts: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            louder = exclaim(texts, "!")
            return louder[1:], louder[:, None].expand(-1, 2), x * 2, exclaim(texts.reshape(1, -1), "?"), texts[0]

    program = onnx_check(
        Model(),
        (string_tensor(TEXTS), torch.randn(len(TEXTS))),
        dynamic_shapes=({0: "texts"}, {0: "texts"}),
        inputs=[(string_tensor(["x", "y"]), torch.randn(2))],
        rules=RULES,
        opsets=(20, 21),
    )
    assert program.model.graph.inputs[0].dtype == ir.DataType.STRING
    results = program(string_tensor(["a", "b"]), torch.zeros(2))
    assert [results[place].tolist() for place in (0, 3, 4)] == [["b!"], [["a?", "b?"]], "a"]


def test_a_saved_model(tmp_path: Any) -> None:
    import onnxruntime

    path = tmp_path / "model.onnx"
    onnxplug.to_onnx(
        lambda texts: exclaim(texts, "é"), (string_tensor(["a"]),), path, rules=RULES, input_names=["texts"]
    )
    (got,) = onnxruntime.InferenceSession(path).run(None, {"texts": np.array(["b"], dtype=object)})
    assert got.tolist() == ["bé"]


def test_verification_compares_strings() -> None:
    with pytest.raises(
        onnxplug.VerificationError, match=r"at index \[0\] is 'b', PyTorch has 'a'; 1 of 1 strings differ"
    ):
        onnxplug.to_onnx(lambda texts: first(texts), (string_tensor(["a", "b"]),), rules=RULES, verify=True)


def test_a_buffer_of_strings() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("labels", string_tensor(["a", "b"]))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, exclaim(self.labels, "!")

    with pytest.raises(onnxplug.Unsupported, match="'labels' is a buffer of strings"):
        onnxplug.to_onnx(Model(), (torch.ones(2),), rules=RULES)
