"""Dimensions and numbers by the user's names, and by expressions of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import CaptureError, UsageError
from onnxplug.capture.dimensions import evaluate, is_expression, names_in

KNOWN = {"past": 9, "sequence": 3}


@pytest.mark.parametrize(
    ("text", "names", "value"),
    [
        ("past + sequence", ["past", "sequence"], 12),
        ("2*past - 1", ["past"], 17),
        ("min(past, 5)", ["past"], 5),
        ("Max(sequence, past, 4)", ["sequence", "past"], 9),
        ("min(past, 5) + max(sequence, 7)", ["past", "sequence"], 12),
    ],
)
def test_expressions(text: str, names: list[str], value: int) -> None:
    assert names_in(text) == names
    assert is_expression(text, KNOWN)
    assert evaluate(text, KNOWN) == value


@pytest.mark.parametrize(
    "text", ["past", "min(past)", "abs(past, 5)", "min(past, key=5)", "f.min(past, 5)", "past/2", "(", "min"]
)
def test_names_that_are_no_expressions(text: str) -> None:
    assert names_in(text) == []
    assert not is_expression(text, KNOWN)


def test_an_unknown_name_in_a_smallest() -> None:
    with pytest.raises(UsageError, match=r"names 'window', but no dimension has that name"):
        is_expression("min(past, window)", KNOWN)


def windowed(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return x.sum() + kept * 2


def test_a_dimension_named_by_the_smaller_of_two() -> None:
    shapes = {"x": {0: "past"}, "kept": {0: "min(past, 4)"}}
    program = onnxplug.to_onnx(windowed, (torch.randn(6), torch.randn(4)), dynamic_shapes=shapes)
    report = program.verify(seeds=range(4))
    assert [str(value.shape) for value in program.model.graph.inputs] == ["[past]", "[Min(4, past)]"]
    assert all(case.sizes["Min(4, past)"] == min(4, case.sizes["past"]) for case in report.cases)
    with pytest.raises(UsageError, match=r"Min\(4, past\)"):
        program(torch.randn(6), torch.randn(3))
    with pytest.raises(UsageError, match=r"is 4 \(past 6\), but its size in the example is 3"):
        onnxplug.to_onnx(windowed, (torch.randn(6), torch.randn(3)), dynamic_shapes=shapes)


def shifted(x: torch.Tensor, *, start: int) -> tuple[torch.Tensor, int]:
    return x + torch.arange(x.shape[0]) + start, start + x.shape[0]


def test_a_number_may_be_named() -> None:
    """A named number is an input of the graph, and dimensions may be named by expressions of it."""
    program = onnxplug.to_onnx(
        shifted, (torch.randn(4),), kwargs={"start": 7}, dynamic_shapes={"x": {0: "sequence"}, "start": "past"}
    )
    report = program.verify()
    assert {"past", "sequence"} <= set(report.cases[0].sizes)
    for start in (0, 3):
        x = torch.randn(5)
        result = program(x, start=start)
        torch.testing.assert_close(result[0], shifted(x, start=start)[0])
        assert int(result[1]) == start + 5


@pytest.mark.filterwarnings("error:the exported model is right only where")
def test_a_branch_that_the_names_answer() -> None:
    """No warning: where the mask is as long as its name says, the branch is always the example's."""

    def masked(x: torch.Tensor, mask: torch.Tensor, *, start: int) -> torch.Tensor:
        if x.shape[0] + start > mask.shape[0]:
            mask = torch.nn.functional.pad(mask, (0, 1))
        return x * mask[start : start + x.shape[0]]

    program = onnxplug.to_onnx(
        masked,
        (torch.randn(3), torch.randn(8)),
        kwargs={"start": 5},
        dynamic_shapes={"x": {0: "sequence"}, "mask": {0: "past + sequence"}, "start": "past"},
    )
    assert len(program.verify().cases) == 4


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": {0: "past"}, "start": "past"}, "'past' names axis 0 of x and the number start"),
        ({"x": None, "start": "7"}, "which is a number"),
        ({"x": "past", "start": None}, "is the string 'past'"),
    ],
)
def test_names_that_are_refused(shapes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        onnxplug.to_onnx(shifted, (torch.randn(4),), kwargs={"start": 7}, dynamic_shapes=shapes)


def test_a_named_number_that_the_model_fixes() -> None:
    def fixed(x: torch.Tensor, *, start: int) -> torch.Tensor:
        return x + int(torch.ones(start).shape[0]) if start == 7 else x

    with pytest.raises(CaptureError, match="start"):
        onnxplug.to_onnx(fixed, (torch.randn(4),), kwargs={"start": 7}, dynamic_shapes={"x": None, "start": "n"})
