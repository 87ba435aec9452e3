"""The installed package: its samples, its operators in a model, and a model of torch_geometric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug


@pytest.mark.onnxplug("torch-geometric")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


@pytest.mark.parametrize("name", ["sum", "mul", "mean", "min", "max"])
@pytest.mark.long
def test_as_many_places_as_rows(onnx_check: Callable[..., Any], name: str) -> None:
    """A size that is dynamic, at other sizes and opsets; also with a place without elements."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
            scatter = getattr(torch.ops.torch_scatter, f"scatter_{name}")
            return scatter(x, index % x.size(0), 0, None, x.size(0))

    args = (torch.randn(5, 3), torch.tensor([4, 0, 0, 2, 2]))
    shapes = ({0: "rows"}, {0: "rows"})
    edge = (torch.tensor([[float("nan"), float("-inf"), 1.0]] * 2), torch.tensor([1, 1]))
    onnx_check(Model(), args, dynamic_shapes=shapes, opsets=(13, 16, 18, 21), inputs=[edge])


def test_segments_become_products(onnx_check: Callable[..., Any], expect_graph: Callable[..., None]) -> None:
    def model(x: torch.Tensor, ptr: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.ops.pyg.segment_matmul(x, ptr, weight)

    args = (torch.randn(5, 3), torch.tensor([0, 2, 5]), torch.randn(2, 3, 4))
    other = (torch.randn(2, 3), torch.tensor([0, 2, 2]), torch.randn(2, 3, 4))
    program = onnxplug.to_onnx(model, args, dynamic_shapes=({0: "rows"}, None, None))
    for operands in (args, other):
        torch.testing.assert_close(program(*operands)[0], model(*operands))
    expect_graph(program, "... MatMul ... MatMul ... Concat")


def test_a_convolution(onnx_check: Callable[..., Any]) -> None:
    gnn = pytest.importorskip("torch_geometric.nn")
    model = gnn.GCN(8, 16, 2, 4).eval()
    args = (torch.randn(5, 8), torch.randint(0, 5, (2, 7)))
    more = [(torch.randn(n, 8), torch.randint(0, n, (2, e))) for n, e in ((1, 1), (9, 30), (4, 0))]
    onnx_check(model, args, dynamic_shapes=({0: "nodes"}, {1: "edges"}), opsets=(18, 21), inputs=more)
