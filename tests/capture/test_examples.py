"""Several example inputs, from which the dynamic dimensions are inferred."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug import CaptureError, UsageError


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y + 1


def total(pair: Any, *, options: dict[str, torch.Tensor], scale: int = 2) -> torch.Tensor:
    return (pair[0] + pair[1]).sum(0) * options["gain"].mean() * scale


Pair = namedtuple("Pair", "left right")


def first_and_sum(pair: Any) -> torch.Tensor:
    return pair[0] + pair[1].sum()


def shapes(program: Any) -> list[str]:
    return [str(value.shape) for value in program.model.graph.inputs]


@pytest.mark.parametrize(
    ("model", "examples", "expected"),
    [
        (product, [(tensor(2, 3), tensor(3, 4)), (tensor(5, 3), tensor(3, 4))], ["[x_dim_0,3]", "[3,4]"]),
        # The multiplied sizes are equal, as torch states. The other sizes vary together by chance.
        (
            product,
            [(tensor(2, 3), tensor(3, 2)), (tensor(5, 4), tensor(4, 5))],
            ["[x_dim_0,x_dim_1]", "[x_dim_1,y_dim_1]"],
        ),
        (
            product,
            [{"x": tensor(1, 3), "y": tensor(3, 4)}, {"y": tensor(3, 4), "x": tensor(6, 3)}],
            ["[x_dim_0,3]", "[3,4]"],
        ),
        (lambda x: x * 2, [tensor(2), tensor(3), tensor(2)], ["[x_dim_0]"]),
        (
            total,
            [
                ([tensor(2, 3), tensor(2, 3)], {"options": {"gain": tensor(4)}}),
                ([tensor(5, 3), tensor(5, 3)], {"options": {"gain": tensor(1)}}),
            ],
            ["[pair_0_dim_0,3]", "[pair_0_dim_0,3]", "[options_gain_dim_0]"],
        ),
        (first_and_sum, [((tensor(2), tensor(3)),), ((tensor(4), tensor(3)),)], ["[pair_0_dim_0]", "[3]"]),
        (first_and_sum, [(Pair(tensor(2), tensor(3)),), (Pair(tensor(4), tensor(3)),)], ["[pair_0_dim_0]", "[3]"]),
        (
            first_and_sum,
            [(OrderedDict({0: tensor(2), 1: tensor(3)}),), (OrderedDict({0: tensor(4), 1: tensor(3)}),)],
            ["[pair_0_dim_0]", "[3]"],
        ),
        (lambda *xs: xs[0] + xs[1].sum(), [(tensor(2), tensor(3)), (tensor(4), tensor(3))], ["[xs_0_dim_0]", "[3]"]),
        (lambda x, by: x * by, [(tensor(2), math.nan), (tensor(4), math.nan)], ["[x_dim_0]"]),
    ],
)
def test_sizes_that_differ_are_dynamic(model: Callable[..., Any], examples: list[Any], expected: list[str]) -> None:
    program = onnxplug.to_onnx(model, examples=examples)
    assert shapes(program) == expected
    report = program.verify(seeds=(0, 2))
    assert [case.seed for case in report.cases] == [*[None] * len(examples), 0, 2]


def test_an_int_that_differs_stays_an_input() -> None:
    options = {"gain": tensor(2)}
    pair = [tensor(2, 3), tensor(2, 3)]
    calls = [(pair, {"options": options, "scale": scale}) for scale in (3, 7)]
    program = onnxplug.to_onnx(total, examples=calls, verify=True)
    assert [value.name for value in program.model.graph.inputs][-1] == "scale"
    result = program(pair, options=options, scale=11)[0]
    torch.testing.assert_close(result, total(pair, options=options, scale=11))


def test_args_are_the_first_example() -> None:
    program = onnxplug.to_onnx(
        product, (tensor(2, 3),), kwargs={"y": tensor(3, 4)}, examples=[(tensor(7, 3), {"y": tensor(3, 4)})]
    )
    assert shapes(program) == ["[x_dim_0,3]", "[3,4]"]
    assert [case.sizes for case in program.verify(seeds=()).cases] == [{"x_dim_0": 2}, {"x_dim_0": 7}]


def test_dynamic_shapes_give_the_names() -> None:
    examples = [(tensor(2, 3), tensor(3, 4)), (tensor(5, 3), tensor(3, 6))]
    named = {"x": {0: "batch"}, "y": {1: Dim("columns", max=9)}}
    program = onnxplug.to_onnx(product, examples=examples, dynamic_shapes=named, verify=True)
    assert shapes(program) == ["[batch,3]", "[3,columns]"]
    with pytest.raises(
        UsageError, match="axis 1 of the input y differs among the examples, but dynamic_shapes leaves it static"
    ):
        onnxplug.to_onnx(product, examples=examples, dynamic_shapes={"x": {0: "batch"}, "y": None})
    with pytest.raises(UsageError, match="is 5 \\(batch 2\\), but its size in the example is 4"):
        onnxplug.to_onnx(product, examples=examples, dynamic_shapes={"x": {0: "batch"}, "y": {1: "batch + 3"}})


def test_a_program_is_verified_on_them() -> None:
    exported = torch.export.export(nn.Linear(3, 4), (tensor(2, 3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    program = onnxplug.to_onnx(exported, examples=[(tensor(2, 3),), (tensor(9, 3),)])
    assert len(program.verify(seeds=()).cases) == 2


def test_a_wrong_result_on_another_example_is_an_error() -> None:
    """The export is right for the first example alone."""

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3

    with pytest.warns(UserWarning, match="right only where"):
        program = onnxplug.to_onnx(branch, examples=[tensor(6), tensor(3)])
    with pytest.raises(onnxplug.VerificationError, match="x_dim_0=3, on the given inputs"):
        program.verify(seeds=())


def test_a_size_that_the_model_fixes() -> None:
    with pytest.raises(CaptureError, match="x_dim_0"):
        onnxplug.to_onnx(lambda x: x + torch.ones(4), examples=[tensor(4), tensor(1)])


X = tensor(2, 3)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (X, "examples= takes a list of inputs"),
        ("ab", "examples= takes a list of inputs"),
        ([3, 4], "examples= takes a list of inputs"),
        ([], "has the inputs of 0 calls"),
        ([X], "has the inputs of 1 call:"),
        ([(X,), (X, X)], "example 2 has 2 positional inputs, example 1 1 positional input"),
        ([{"x": X}, {"y": X}], "example 2 has 0 positional inputs and y, example 1 0 positional inputs and x"),
        ([X, X.double()], r"x is float32\[2, 3\] in example 1 and float64\[2, 3\] in example 2: only sizes may differ"),
        ([X, X[0]], r"x is float32\[2, 3\] in example 1 and float32\[3\] in example 2"),
        ([(X,), (2.0,)], "x is a tensor in example 1 and a float in example 2"),
        ([(2.0,), (3.0,)], r"x is 2.0 in example 1 and 3.0 in example 2: only sizes of tensors, and ints"),
        ([(0.0,), (-0.0,)], r"x is 0.0 in example 1 and -0.0 in example 2"),
        ([(None,), (X,)], r"x is None in example 1 and float32\[2, 3\] in example 2"),
        ([(numpy.ones(2),), (numpy.ones(3),)], r"x is array\(\[1., 1.\]\) in example 1 and array"),
        ([(True,), (False,)], "x is True in example 1 and False"),
        ([([X, X],), ([X],)], "x of example 2 has another structure than that of example 1"),
        ([([X],), ((X,),)], "x of example 2 has another structure"),
        ([({"a": X}, {}), ({"b": X}, {})], r"another structure than that of example 1: \{b\}, not \{a\}"),
    ],
)
def test_examples_that_are_refused(examples: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(lambda x: x, examples=examples)
