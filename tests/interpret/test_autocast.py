"""Composite operators under autocast: torch.export records them without the casts of the operators that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from tests.support.tolerances import looser

X, W = torch.randn(3, 4), torch.randn(4, 4)
OTHERS = [(torch.randn(5, 4) * 2, W.flip(0)), (torch.randn(1, 4), W + 1)]
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "einsum of einsum": lambda x, w: torch.einsum("ij,jk->ik", torch.einsum("ij,jk->ik", x, w), w),
}


class Products(torch.nn.Module):
    def __init__(self, product: Callable[..., torch.Tensor], branch: bool = False) -> None:
        super().__init__()
        self.product, self.branch = product, branch

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if self.branch:  # torch leaves a region that begins with a branch as a pair of calls
                x = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))
            y = self.product(x, w)
            with torch.autocast("cpu", enabled=False):
                z = self.product(x, w)
        return y, z, y + z


def compare(program: onnxplug.OnnxProgram, model: torch.nn.Module, *inputs: tuple[torch.Tensor, ...]) -> None:
    for args in inputs:
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(model(*args))
        for ours, theirs in zip(program(*args), expected, strict=True):
            assert ours.dtype is theirs.dtype
            largest = theirs.abs().max()
            torch.testing.assert_close(ours / largest, theirs / largest, **looser("autocast"))


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_within_composite_operators(name: str, branch: bool) -> None:
    model = Products(PRODUCTS[name], branch)
    program = onnxplug.to_onnx(model, (X, W), dynamic_shapes=({0: "n"}, None))
    compare(program, model, (X, W), *OTHERS)
    again = torch.export.export(model, (X, W), dynamic_shapes=({0: torch.export.Dim("n")}, None))
    compare(onnxplug.to_onnx(again), model, (X, W), *OTHERS)


def test_the_autocast_of_another_device_changes_nothing() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cuda", enabled=False):
                return torch.einsum("ij,jk->ik", x, w)

    program = onnxplug.to_onnx(Model(), (X, W), dynamic_shapes=({0: "n"}, None))
    compare(program, Model(), (X, W), *OTHERS)


def test_an_operator_outside_stays_whole() -> None:
    """So do composite operators within which nothing is cast."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.nn.functional.pixel_shuffle((x @ w).reshape(1, 4, 1, -1), 2)
            return y, torch.einsum("bij,bjk->bik", x[None], w[None])

    program = onnxplug.to_onnx(Model(), (X, W))
    operators = {str(node.target) for node in program.exported_program.graph.nodes}
    assert {"aten.pixel_shuffle.default", "aten.einsum.default"} <= operators
    compare(program, Model(), (X, W))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_layers(layer: type[torch.nn.RNNBase], dtype: torch.dtype) -> None:
    """Autocast casts no doubles."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x)

    torch.manual_seed(0)
    model, x = Model().eval().to(dtype), torch.randn(2, 5, 4, dtype=dtype)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "batch", 1: "length"},))
    compare(program, model, (x,), (torch.randn(3, 7, 4, dtype=dtype),), (torch.randn(1, 1, 4, dtype=dtype),))
