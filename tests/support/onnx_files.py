"""Small models made node by node, and the model that several exporters export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper
import torch

F = onnx.TensorProto.FLOAT


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.norm(self.linear(x))) + x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3))
        for layer in self.layers:
            y = layer(y)
        return y


def example() -> tuple[Model, tuple[torch.Tensor]]:
    """The model with its input; no two of its weights are equal."""
    torch.manual_seed(0)
    model = Model().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model, (torch.randn(2, 3, 8, 8),)


BATCH = ({0: "batch"},)


def made(
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Sequence[Any] = (("x", ["n", 4]),),
    outputs: Sequence[Any] = (("y", None),),
    weights: dict[str, Any] | None = None,
    opset: int = 21,
    **options: Any,
) -> onnx.ModelProto:
    """A model of floats.

    Args:
        nodes: Its nodes.
        inputs, outputs: Names and shapes.
        weights: Arrays by name.
        opset: Of ai.onnx.
        options: Further arguments of ``make_model``.
    """
    graph = oh.make_graph(
        list(nodes),
        "g",
        [oh.make_tensor_value_info(name, F, shape) for name, shape in inputs],
        [oh.make_tensor_value_info(name, F, shape) for name, shape in outputs],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()],
    )
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", opset)], ir_version=10, **options)
