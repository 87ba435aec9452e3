"""Examples of size 1 that operators broadcast: the dimension stays dynamic, and the model is right at every size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

import onnxplug

Shapes = tuple[tuple[int, ...], ...]

#: Each with the example's shapes and other shapes, among them shapes that broadcast the other operand.
RIGHT: dict[str, tuple[Callable[..., Any], Shapes, list[Shapes]]] = {
    "add": (torch.add, ((3, 4), (3, 1)), [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5)), ((2, 1), (2, 1))]),
    "logaddexp": (torch.logaddexp, ((3, 4), (3, 1)), [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5))]),
    "both": (torch.atan2, ((3, 1), (1, 4)), [((2, 1), (1, 5)), ((2, 5), (2, 5)), ((1, 5), (2, 1)), ((2, 1), (1, 1))]),
    "where": (
        lambda c, x, y: torch.where(c > 0, x, y),
        ((3, 1), (3, 4), (1, 4)),
        [((2, 1), (2, 5), (1, 5)), ((2, 5), (2, 5), (2, 5))],
    ),
    "prelu": (F.prelu, ((2, 3, 4), (1,)), [((3, 5, 2), (1,)), ((3, 5, 2), (5,)), ((1, 1, 1), (1,))]),
    "further ranks": (
        lambda x, y: x * y - x,
        ((2, 3, 4), (1,)),
        [((1, 2, 5), (1,)), ((1, 2, 5), (5,)), ((1, 2, 1), (5,))],
    ),
    "a batch of matrices": (
        torch.matmul,
        ((1, 3, 5), (2, 5, 4)),
        [((1, 2, 7), (3, 7, 2)), ((3, 2, 7), (3, 7, 2)), ((1, 2, 7), (1, 7, 2))],
    ),
    "a chain": (
        lambda x, y: torch.exp((x + y) * y - x).sum(0),
        ((3, 4), (3, 1)),
        [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5))],
    ),
    "a reduction": (
        lambda x, y: (x - y).mean(1, keepdim=True) + y,
        ((3, 4), (3, 1)),
        [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5))],
    ),
    "a constant": (lambda x: x + torch.arange(4.0), ((3, 1),), [((2, 1),), ((2, 4),)]),
    "expand_as": (lambda x, y: x * 1 + y, ((1, 4), (3, 4)), [((1, 2), (5, 2)), ((5, 2), (5, 2))]),
    "in place": (lambda x, y: (x * 2).add_(y), ((3, 4), (3, 1)), [((2, 5), (2, 1)), ((2, 5), (2, 5))]),
    "masked_fill": (
        lambda x, m: x.masked_fill(m > 0, 0.0),
        ((3, 4), (1, 4)),
        [((2, 5), (1, 5)), ((2, 5), (2, 5)), ((1, 5), (2, 5))],
    ),
    "lerp": (torch.lerp, ((3, 4), (3, 1), (1, 4)), [((2, 5), (2, 1), (1, 5)), ((2, 5), (2, 5), (2, 5))]),
    "clamp": (torch.clamp, ((3, 4), (3, 1), (1, 4)), [((2, 5), (2, 1), (1, 5)), ((2, 5), (2, 5), (2, 5))]),
    "addcmul": (torch.addcmul, ((3, 4), (3, 1), (1, 4)), [((2, 5), (2, 1), (1, 5)), ((2, 5), (2, 5), (2, 5))]),
    "isclose": (
        torch.isclose,
        ((3, 4), (3, 1)),
        [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5))],
    ),
    "a batch of distances": (
        torch.cdist,
        ((1, 2, 4), (3, 5, 4)),
        [((1, 2, 5), (2, 4, 5)), ((2, 2, 5), (2, 4, 5)), ((2, 2, 5), (1, 4, 5))],
    ),
    "heaviside": (torch.heaviside, ((3, 4), (3, 1)), [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5))]),
    "dist": (torch.dist, ((1, 4), (3, 4)), [((1, 5), (2, 5)), ((2, 5), (2, 5)), ((2, 5), (1, 5)), ((0, 5), (1, 5))]),
    "dist by the largest": (
        lambda x, y: torch.dist(x, y, float("inf")),
        ((1, 4), (3, 4)),
        [((1, 5), (2, 5)), ((2, 5), (2, 5)), ((2, 5), (1, 5))],
    ),
    "cross": (
        lambda x, y: torch.linalg.cross(torch.stack([x, x + 1, x * 2], 1), torch.stack([y, y * y, 1 - y], 1), dim=1),
        ((3, 4), (3, 1)),
        [((2, 5), (2, 1)), ((2, 5), (2, 5)), ((2, 1), (2, 5)), ((0, 5), (0, 1))],
    ),
    "empty": (torch.add, ((3, 4), (3, 1)), [((0, 4), (0, 1)), ((2, 0), (2, 1))]),
}


class Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, y: Any = None, z: Any = None) -> Any:
        return self.function(*(value for value in (x, y, z) if value is not None))


def drawn(shapes: Shapes) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


@pytest.mark.parametrize("wanted", ["name", "Dim", "DYNAMIC", "AUTO"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_size_that_is_broadcast_stays_dynamic(name: str, wanted: str) -> None:
    function, example, others = RIGHT[name]
    model = Called(function).eval()

    def dim(argument: int, axis: int) -> Any:
        text = (
            f"d{argument}_{axis}" if wanted == "name" or (axis, argument) != (len(example[argument]) - 1, 1) else "last"
        )
        return {"name": text, "Dim": text, "DYNAMIC": Dim.DYNAMIC, "AUTO": Dim.AUTO}[wanted]

    shapes = tuple({axis: dim(i, axis) for axis in range(len(shape))} for i, shape in enumerate(example))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, drawn(example), dynamic_shapes=shapes)
    small = [
        (value, axis)
        for value, shape in zip(program.model.graph.inputs, example, strict=True)
        for axis, n in enumerate(shape)
        if n == 1
    ]
    assert not any(isinstance(value.shape[axis], int) for value, axis in small)
    for shape in (example, *others):
        args = drawn(shape)
        torch.testing.assert_close(program(*args)[0], model.forward(*args), msg=lambda m: f"{shape}: {m}")  # noqa: B023


USED: dict[str, Callable[..., Any]] = {
    "the size itself": lambda x, y: (x + y) * (x + y).shape[1],
    "a shape": lambda x, y: (x + y).reshape(-1),
    "ones": lambda x, y: (x + y) @ x.new_ones((x + y).shape[1], 2),
    "broadcast_tensors": lambda x, y: torch.broadcast_tensors(x, y)[1] + 1,
    "a loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
}


@pytest.mark.parametrize("name", USED)
def test_a_size_of_the_result_that_is_used_is_reported(name: str) -> None:
    model = Called(USED[name]).eval()
    with pytest.warns(
        UserWarning, match=r"right only where (k == 1 or n != 1|n != 1 or k == 1): .*test_broadcasts\.py:\d+ uses"
    ):
        program = onnxplug.to_onnx(model, drawn(((3, 4), (3, 1))), dynamic_shapes=({0: "b", 1: "n"}, {0: "b", 1: "k"}))
    for shapes in (((2, 5), (2, 1)), ((2, 5), (2, 5)), ((3, 1), (3, 1))):
        args = drawn(shapes)
        torch.testing.assert_close(program(*args)[0], model.forward(*args))
    for case in program.verify(seeds=range(6)).cases:
        assert case.sizes["n"] != 1 or case.sizes["k"] == 1
    automatic = ({0: "b", 1: "n"}, {0: "b", 1: Dim.AUTO})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, drawn(((3, 4), (3, 1))), dynamic_shapes=automatic)
    assert program.model.graph.inputs[1].shape[1] == 1


def test_a_size_that_is_expanded_stays_dynamic() -> None:
    def expanded(x: torch.Tensor) -> torch.Tensor:
        return x.expand(4, 3) + 1

    program = onnxplug.to_onnx(expanded, drawn(((1, 3),)), dynamic_shapes=({0: "b"},))
    for rows in (1, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(program(x)[0], expanded(x))


def test_a_branch_on_a_size_of_1_is_still_an_error() -> None:
    def branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if y.shape[1] == 1 else x - y

    with pytest.raises(onnxplug.FixedDimensionError, match=r"'k'.*test_broadcasts\.py:\d+ fixes it.*k == 1"):
        onnxplug.to_onnx(branch, drawn(((3, 4), (3, 1))), dynamic_shapes=({0: "b", 1: "n"}, {0: "b", 1: "k"}))
