"""Reshapes of tensors that are empty at some sizes: a size of n - 1 is 0 where n is 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from tests.support.check import Call

#: The shapes of a first and a second operand at the sizes b and n; each case also names their axes.
Shapes = Callable[[int, int], tuple[tuple[int, ...], tuple[int, ...]]]
CASES: dict[str, tuple[Callable[..., Any], Shapes, Any]] = {
    "heads": (
        lambda x, y: x[:, :-1].transpose(0, 1).reshape(y.shape[0], y.shape[1] * 4, 8),
        lambda b, n: ((b, n, 32), (n - 1, b)),
        ({0: "b", 1: "n"}, {0: "n-1", 1: "b"}),
    ),
    "view": (
        lambda x, y: x[:, :-1].transpose(0, 1).contiguous().view(x.shape[1] - 1, x.shape[0] * 4, 2).transpose(0, 1),
        lambda b, n: ((b, n, 8), (b, 2)),
        ({0: "b", 1: "n"}, {0: "b"}),
    ),
    "flatten and unflatten": (
        lambda x, y: x[:, :-1].transpose(0, 1).flatten(1).unflatten(1, (x.shape[0] * 2, 4)),
        lambda b, n: ((b, n, 8), (b, 2)),
        ({0: "b", 1: "n"}, {0: "b"}),
    ),
    "sizes of two inputs": (
        lambda x, y: x[y.shape[0] :].reshape(x.shape[0] - y.shape[0], x.shape[1] * 2, 4),
        lambda b, n: ((b + n - 1, b, 8), (b, 2)),
        ({0: "m", 1: "k"}, {0: "b"}),
    ),
    "a size that falls": (
        lambda x, y: x[:, y.shape[0] :].transpose(0, 1).reshape(5 - y.shape[0], x.shape[0] * 2, 4),
        lambda b, n: ((b, 5, 8), ({5: 3, 1: 5}.get(n, n), 2)),
        ({0: "b"}, {0: torch.export.Dim("n", max=5)}),
    ),
}


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_reshape_of_an_empty_tensor(name: str, optimize: bool) -> None:
    function, shapes, dynamic = CASES[name]
    args = tuple(map(torch.randn, shapes(3, 5)))
    program = onnxplug.to_onnx(Call(function), args, dynamic_shapes=(dynamic,), optimize=optimize)
    for sizes in ((3, 5), (3, 1), (1, 1), (2, 2)):
        args = tuple(map(torch.randn, shapes(*sizes)))
        torch.testing.assert_close(program(*args)[0], function(*args))


def test_other_reshapes_infer_a_size() -> None:
    """Every size is computed only where a size may be 0."""
    function = Call(lambda x: x[:, 1:].flatten(1, 2))
    program = onnxplug.to_onnx(function, (torch.randn(3, 5, 8),), dynamic_shapes=(({0: "b", 1: "n"},),))
    (node,) = (node for node in program.model.graph if node.op_type == "Reshape")
    target: Any = node.inputs[1]
    assert target.const_value.numpy().tolist() == [0, -1]
