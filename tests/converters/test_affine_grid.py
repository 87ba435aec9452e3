"""Grids of places: images and volumes, static and dynamic sizes, axes of one element, opsets with AffineGrid and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from tests.support.check import check
from tests.support.tolerances import looser


class Grid(torch.nn.Module):
    """A grid for the sizes of a tensor."""

    def __init__(self, align_corners: bool) -> None:
        super().__init__()
        self.align_corners = align_corners

    def forward(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.affine_grid(theta, list(x.shape), align_corners=self.align_corners)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(shape) - 2
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape[0], count, count + 1, generator=generator).to(dtype), torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("opset", [16, 19, 20, 21])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(
    "shapes", [[(2, 3, 4, 5), (1, 3, 1, 1), (2, 3, 1, 7), (3, 3, 224, 1)], [(2, 1, 3, 4, 5), (1, 1, 1, 6, 1)]]
)
def test_dynamic_sizes(shapes: list[tuple[int, ...]], align_corners: bool, opset: int) -> None:
    sizes = {0: Dim.DYNAMIC, **dict.fromkeys(range(2, len(shapes[0])), Dim.DYNAMIC)}
    dynamic = ({0: Dim.DYNAMIC}, sizes)
    others = [inputs(*shape) for shape in shapes[1:]]
    check(Grid(align_corners), *inputs(*shapes[0]), others=others, dynamic=dynamic, opset=opset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("align_corners", [False, True])
def test_dtypes_and_static_sizes(align_corners: bool, dtype: torch.dtype) -> None:
    is_wide = dtype in (torch.float32, torch.float64)  # torch has no grid of halves for an axis of one element
    for shape in ((2, 3, 4, 5), (2, 3, 1, 5))[: 1 + is_wide]:
        args = inputs(*shape, dtype=dtype)
        tolerance = {torch.float16: looser("half"), torch.bfloat16: looser("grids, bfloat16")}.get(dtype, {})
        program = check(Grid(align_corners), *args, others=[(args[0].flip(0) * 2, args[1])], **tolerance)
        has_node = any(node.op_type == "AffineGrid" for node in program.model.graph)
        assert has_node == (is_wide and not (align_corners and 1 in shape))


@pytest.mark.parametrize("example", [(2, 3, 4, 5), (1, 3, 1, 1)])
def test_a_spatial_transformer(example: tuple[int, ...]) -> None:
    class Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = torch.nn.Linear(3, 6)

        def forward(self, x: torch.Tensor) -> Any:
            theta = self.places(x.mean((2, 3))).view(-1, 2, 3)
            return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)

    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    others = [(torch.randn(3, 3, 7, 9),), (torch.randn(1, 3, 12, 6),)]
    check(Transformer(), torch.randn(example), others=others, dynamic=(sizes,))
