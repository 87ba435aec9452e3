"""``associative_scan`` of static and dynamic sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan
from torch.export import Dim

import onnxplug
from onnxplug.patches.associative import _scan
from tests.support.sampling import rotated

Pair = tuple[torch.Tensor, torch.Tensor]
BOTH: Any = Dim.DYNAMIC


def recurrence(first: Pair, second: Pair) -> Pair:
    """``h = a * h + b``, of two steps in turn."""
    return second[0] * first[0], second[0] * first[1] + second[1]


class Scan(nn.Module):
    """A scan along one axis."""

    def __init__(self, function: Callable[..., Any], dim: int, reverse: bool) -> None:
        super().__init__()
        self.function, self.dim, self.reverse = function, dim, reverse

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        inputs = (x, y) if self.function is recurrence else x
        return associative_scan(self.function, inputs, dim=self.dim, reverse=self.reverse, combine_mode="generic")


def check(model: nn.Module, dynamic: set[int], args: Pair) -> None:
    shapes = (dict.fromkeys(dynamic, BOTH),) * 2 if dynamic else None
    program = onnxplug.to_onnx(model, args, dynamic_shapes=shapes)
    for offset in (0, 1, 3, -2) if dynamic else (0,):
        shape = [size + (offset if axis in dynamic else 0) for axis, size in enumerate(args[0].shape)]
        fresh = torch.rand(shape), torch.randn(shape)
        expected = torch.utils._pytree.tree_leaves(model(*fresh))
        torch.testing.assert_close(list(program(*fresh)), expected)


CASES = {
    f"{function.__name__} {dim} {'reverse ' if reverse else ''}{sorted(dynamic)}": (function, dim, reverse, dynamic)
    for function in (recurrence, torch.add, torch.maximum)
    for dim in (0, -2, 2)
    for reverse in (False, True)
    for dynamic in ([set(), {0}, {1}, {2}, {0, 1, 2}] if function is recurrence else [set(), {0, 1, 2}])
}


@pytest.mark.parametrize("case", rotated(CASES, every=5))
def test_any_axis_of_any_size(case: str) -> None:
    function, dim, reverse, dynamic = CASES[case]
    check(Scan(function, dim, reverse), dynamic, (torch.rand(3, 5, 4), torch.rand(3, 5, 4)))


@pytest.mark.long
def test_named_dimensions() -> None:
    model, args = Scan(recurrence, 1, False), (torch.rand(3, 5, 4), torch.rand(3, 5, 4))
    for names in ({0: "batch"}, {1: "steps"}, {0: "batch", 1: "steps"}):
        onnxplug.to_onnx(model, args, dynamic_shapes=(names, names), verify=True)


def test_one_element_at_run_time() -> None:
    model = Scan(recurrence, 0, False)
    program = onnxplug.to_onnx(model, (torch.rand(4, 2), torch.rand(4, 2)), dynamic_shapes=({0: BOTH}, {0: BOTH}))
    args = torch.full((1, 2), float("inf")), torch.tensor([[0.0, -float("inf")]])
    torch.testing.assert_close(list(program(*args)), list(args))  # nothing is combined: inf * 0 is not there


class Weighted(nn.Module):
    """The function reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def function(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sum": first["sum"] + second["sum"], "top": torch.maximum(first["top"], second["top"])}

        result = associative_scan(function, {"sum": x * self.shift, "top": x}, dim=1, combine_mode="generic")
        return result["sum"] + result["top"]


def test_trees_and_parameters() -> None:
    program = onnxplug.to_onnx(Weighted(), (torch.rand(2, 5, 4),), dynamic_shapes=({0: BOTH, 1: BOTH},), verify=True)
    x = torch.randn(3, 9, 4)
    torch.testing.assert_close(program(x)[0], Weighted.forward(program.captured.reference, x).detach())  # type: ignore[union-attr]


@pytest.mark.parametrize("count", range(1, 18))
def test_the_unrolled_scan_is_torchs_own(count: int) -> None:
    torchs = importlib.import_module("torch._higher_order_ops.associative_scan").generic_associative_scan
    x = torch.randn(2, count)
    for function in (torch.add, torch.maximum):
        torch.testing.assert_close(_scan(function, [x], 1), torchs(function, [x], 1))


def test_torchs_function_is_there_again_afterwards() -> None:
    module = importlib.import_module("torch._higher_order_ops.associative_scan")
    before = module.generic_associative_scan
    onnxplug.to_onnx(Scan(torch.add, 0, False), (torch.rand(3, 2), torch.rand(3, 2)))
    assert module.generic_associative_scan is before
