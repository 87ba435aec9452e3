"""Reshapes whose target has a size of 0 when the model runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import onnxplug


class Heads(nn.Module):
    """Columns divided among heads, the rows of two axes flattened by a product with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("opset", [14, 21])
def test_an_axis_of_size_0(opset: int, optimize: bool) -> None:
    model = Heads().eval()
    shapes = {"x": {0: "batch", 1: "length"}}
    program = onnxplug.to_onnx(
        model, (torch.randn(3, 5, 8),), dynamic_shapes=shapes, opset_version=opset, optimize=optimize
    )
    program.verify()
    for shape in ((3, 0, 8), (2, 5, 8), (1, 1, 8)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(program(x)[0], model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 1:].reshape(x.shape[1] - 1, x.shape[0]),
        lambda x: x[:, 1:].flatten().view(x.shape[0], x.shape[1] - 1),
        lambda x: torch.cat([x, x], 1)[torch.cat([x > 0, x <= 0], 1)].reshape(x.shape)[:, 1:].T,
        lambda x: x[:, 1:][x[:, 1:] == x[:, 1:]].reshape(x.shape[0], x.shape[1] - 1),
        lambda x: x[:, : x.shape[1] // 2].reshape(x.shape[1] // 2, x.shape[0]),
    ],
)
def test_a_computed_size_is_0(function: Callable[..., torch.Tensor]) -> None:
    program = onnxplug.to_onnx(function, (torch.randn(3, 6),), dynamic_shapes={"x": {0: "batch", 1: "length"}})
    for shape in ((3, 6), (2, 1), (1, 1), (2, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x)[0], function(x))


def test_reshapes_that_copy_or_infer_a_size_stay() -> None:
    program = onnxplug.to_onnx(
        lambda x: (x.view(x.shape[0], 2, -1), x.view(-1, 4)),
        (torch.randn(3, 8),),
        dynamic_shapes={"x": {0: "batch"}},
        verify=True,
    )
    reshapes = [node for node in program.model.graph if node.op_type == "Reshape"]
    assert reshapes
    assert all("allowzero" not in node.attributes for node in reshapes)
