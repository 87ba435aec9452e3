"""Factory functions whose arguments depend on dynamic sizes."""

from __future__ import annotations

import pytest
import torch

from tests.support.check import check

DYNAMIC = ({0: torch.export.Dim("n", max=5)},)

#: Start, end and step as functions of a size.
RANGES = {
    "size, float, float": lambda n: (n, 8.5, 1.5),
    "float end of a size": lambda n: (0, n * 1.5, 1.5),
    "quotient of a size": lambda n: (n / 2, 20, 3),
    "downwards": lambda n: (n + 0.5, -4.5, -1.5),
    "negative start": lambda n: (-n / 2 - 0.2, 5.9, 2.9),
    "floats without a fraction": lambda n: (0.0, n * 2.0, 1.0),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_arange_of_floats(name: str, dtype: torch.dtype) -> None:
    """For an integer dtype, eager truncates each argument to an integer first."""
    bounds = RANGES[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(*bounds(x.size(0)), dtype=dtype) + 0

    check(function, torch.zeros(3), others=[(torch.zeros(n),) for n in (1, 2, 4, 5)], dynamic=DYNAMIC)
