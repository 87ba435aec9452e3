"""Exports for targets, with forms in place of nodes that a target fails on, compared with eager PyTorch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from onnxplug_targets import fallbacks
from torch import nn

import onnxplug

DYNAMIC = torch.export.Dim.DYNAMIC
NAN, INF = float("nan"), float("inf")


class Sampled(nn.Module):
    """Pixels of an image."""

    def __init__(self, padding: str, corners: bool) -> None:
        super().__init__()
        self.padding, self.corners = padding, corners

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """The pixels [batch, channels, rows, columns]."""
        return nn.functional.grid_sample(x, grid, padding_mode=self.padding, align_corners=self.corners)


class Scattered(nn.Module):
    """Sums over rows."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of matrices, of vectors and of images."""
        images = torch.zeros(x.shape[0], 2, 3).index_add(0, index, rows[:, None].expand(-1, 2, -1))
        return x.index_add(0, index, rows), x[:, 0].index_add(0, index, rows[:, 1]), images


def _compare(model: nn.Module, calls: list[tuple[Any, ...]], shapes: Any, target: str = "openvino") -> Counter[str]:
    """Exports with the first inputs, compares with eager on all, and returns the operators."""
    program = onnxplug.to_onnx(model, calls[0], dynamic_shapes=shapes, target=target)
    for args in calls:
        expected = model(*args)
        results = program(*args)
        for one, other in zip(results, [expected] if isinstance(expected, torch.Tensor) else expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
    assert fallbacks(program, target) == []
    return Counter(node.op_type for node in program.model.graph)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.long
def test_grid_sample(padding: str, corners: bool) -> None:
    torch.manual_seed(0)
    calls = [
        (torch.randn(2, 3, 5, 7), torch.rand(2, 4, 6, 2) * 4 - 2),
        (torch.randn(1, 3, 2, 9), torch.randn(1, 1, 3, 2)),
        (torch.randn(1, 3, 2, 2), torch.tensor([[[[1.0, -1.0], [0.0, 1.0], [-1.0, 0.5], [-3.0, 7.0]]]])),
    ]
    shapes = ({0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC}, {0: DYNAMIC, 1: DYNAMIC, 2: DYNAMIC})
    operators = _compare(Sampled(padding, corners), calls, shapes)
    assert not operators["GridSample"]
    assert operators["GatherElements"] == 4
    plain = onnxplug.to_onnx(Sampled(padding, corners), calls[0], dynamic_shapes=shapes)
    assert [f.reason for f in fallbacks(plain, "openvino") if f.operator == "GridSample"] == ["mode=linear"]


def test_grid_sample_outside_of_everything() -> None:
    torch.manual_seed(0)
    grid = torch.tensor(
        [[[[NAN, 0.0], [INF, 0.0], [0.0, -INF], [0.3, NAN]], [[0.1, 0.2], [-0.9, 1.0], [9.0, 9.0], [0.0, 0.0]]]]
    )
    calls = [(torch.randn(1, 2, 3, 4), torch.rand(1, 2, 4, 2)), (torch.randn(1, 2, 3, 4), grid)]
    program = onnxplug.to_onnx(Sampled("zeros", False), calls[0], target="openvino")
    for args in calls:
        torch.testing.assert_close(program(*args)[0], Sampled("zeros", False)(*args), equal_nan=True)


@pytest.mark.parametrize("target", ["openvino", "onnxruntime:openvino"])
def test_sums_over_rows(target: str) -> None:
    torch.manual_seed(0)
    calls = [
        (torch.randn(5, 3), torch.tensor([0, 4, 0, 2]), torch.randn(4, 3)),
        (torch.randn(2, 3), torch.tensor([1]), torch.randn(1, 3)),
    ]
    operators = _compare(Scattered(), calls, ({0: DYNAMIC}, {0: DYNAMIC}, {0: DYNAMIC}), target)
    assert operators["ScatterElements"] == 3
    assert not operators["ScatterND"]


def test_integers_with_a_lower_bound() -> None:
    class Clamped(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.clamp(min=2), x.clamp(-1, 3)

    calls = [(torch.tensor([[7, -5, 3]]),), (torch.tensor([[2**40, -(2**40), 0, 2]]),)]
    operators = _compare(Clamped(), calls, ({1: DYNAMIC},))
    assert operators == {"Max": 1, "Clip": 1}


class Windows(nn.Module):
    """An image's windows, as in Swin, and an image made from them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [batch * 6, 16, 3] of [batch, 8, 12, 3], and their image plus the image with shuffled axes."""
        windows = x.view(-1, 2, 4, 3, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 3).sin()
        back = windows.view(-1, 2, 3, 4, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, 12, 3)
        return windows, back + x.view(-1, 2, 2, 2, 6, 6).permute(5, 4, 3, 2, 1, 0).reshape(-1, 8, 12, 3)


@pytest.mark.parametrize("target", ["qnn", "onnxruntime:coreml"])
@pytest.mark.parametrize("shapes", [None, ({0: torch.export.Dim("batch")},)])
def test_windows_in_five_axes(target: str, shapes: Any) -> None:
    calls = [(torch.randn(2, 8, 12, 3),), (torch.randn(1 if shapes else 2, 8, 12, 3) * 3,)]
    program = onnxplug.to_onnx(Windows(), calls[0], dynamic_shapes=shapes, target=target)
    for args in calls:
        for result, expected in zip(program(*args), Windows()(*args), strict=True):
            torch.testing.assert_close(result, expected)
    axes = [len(value.shape) for node in program.model.graph for value in node.outputs]
    assert axes.count(6) == 2  # only of axes that do not stay adjacent
    plain = onnxplug.to_onnx(Windows(), calls[0], dynamic_shapes=shapes)
    assert [len(value.shape) for node in plain.model.graph for value in node.outputs].count(6) == 6


class Largest(nn.Module):
    """Largest and smallest elements of concatenated tensors."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of [N, 3] and [M, 3]: over the rows, over the columns, in a branch; the tensors together and their sum."""
        rows = torch.cat([x, y])
        columns = torch.cat([x, x.sin()], dim=1)
        branch = torch.cond(
            x[0, 0] > 0,
            lambda a, b: torch.cat([b, a]).amax(0),
            lambda a, b: torch.cat([b, a.sin()]).amin(0, keepdim=True).sum(0),
            (x, y),
        )
        return rows.amax(0), rows.T.amin(1, keepdim=True), columns.amax(1), branch, rows, rows.sum(0)


@pytest.mark.parametrize("target", ["openvino", "onnxruntime:openvino"])
@pytest.mark.long
def test_largest_of_two_tensors(target: str) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(n, 3) + n % 2 - 0.5, torch.randn(m, 3) * 2) for n, m in ((5, 2), (1, 7), (4, 4), (3, 1))]
    shapes = ({0: DYNAMIC}, {0: DYNAMIC})
    _compare(Largest(), calls, shapes, target)
    plain = onnxplug.to_onnx(Largest(), calls[0], dynamic_shapes=shapes)
    found = [f.operator for f in fallbacks(plain, "openvino") if f.breaks]
    assert sorted(found) == ["If", "ReduceMax", "ReduceMax", "ReduceMin"]
