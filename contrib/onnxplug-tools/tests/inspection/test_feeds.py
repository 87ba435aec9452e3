"""Inputs for a model from a file."""

from __future__ import annotations

import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
from onnxplug_tools.inspection.feeds import make_feed

from onnxplug.errors import UsageError
from tests.support.onnx_files import made


def _model() -> ir.Model:
    inputs = [("x", ["batch", 4]), ("mask", ["batch", "Max(past + sequence, 1)"]), ("k", ["heads/2", "k-l"])]
    return ir.from_proto(made([oh.make_node("Relu", ["x"], ["y"])], inputs=inputs))


def test_sizes_of_names_and_of_names_in_expressions() -> None:
    feed = make_feed(_model(), sizes={"batch": 3, "past": 5, "sequence": 2, "heads/2": 6, "k-l": 7})
    assert {name: list(value.shape) for name, value in feed.values.items()} == {
        "x": [3, 4],
        "mask": [3, 7],
        "k": [6, 7],
    }
    assert feed.assumed == ()


@pytest.mark.parametrize("name", ["batc", "b", "seq", "Max", "past +", "1"])
def test_parts_of_names_are_no_names(name: str) -> None:
    with pytest.raises(UsageError, match="no input has a dimension") as caught:
        make_feed(_model(), sizes={name: 4})
    if name == "batc":
        assert caught.value.hint == "Did you mean 'batch'?"


def test_a_negative_size_is_an_unknown_one() -> None:
    """Some exporters write -1 for a dynamic size, and ONNX Runtime takes any size there."""
    model = ir.from_proto(made([oh.make_node("Relu", ["x"], ["y"])], inputs=[("x", [-1, 4])]))
    assert list(make_feed(model).values["x"].shape) == [1, 4]
    assert list(make_feed(model, [("x", torch.ones(3, 4))]).values["x"].shape) == [3, 4]
    with pytest.raises(UsageError, match=r"has the shape \[3, 5\], the model takes \[None, 4\]"):
        make_feed(model, [("x", torch.ones(3, 5))])


def test_an_input_larger_than_the_memory() -> None:
    with pytest.raises(
        UsageError, match=r"'x' of the shape \[1000000000000000, 4\] can't be made: it takes 16,000,000,"
    ):
        make_feed(_model(), sizes={"batch": 10**15})
