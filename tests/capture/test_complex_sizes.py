"""Sizes beside complex tensors stay dynamic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.check import check

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean": lambda x: (x.mean(1), x.mean(0, keepdim=True), x.mean((0, 1))),
    "var_mean": lambda x: (*torch.var_mean(x, dim=0, correction=0), *torch.std_mean(x, dim=1, correction=0)),
    "numbers": lambda x: (x / x.shape[0], x * x.shape[1], x.shape[0] - x, x + 0.5 * x.shape[1]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_beside_complex_tensors(name: str) -> None:
    def model(x: torch.Tensor) -> Any:
        results = FUNCTIONS[name](x)
        return tuple(torch.view_as_real(result) if result.is_complex() else result for result in results)

    first, *others = (torch.randn(shape, dtype=torch.complex64) for shape in ((3, 4), (5, 2), (1, 7)))
    check(model, first, others=[(x,) for x in others], dynamic=({0: "n", 1: "m"},))
