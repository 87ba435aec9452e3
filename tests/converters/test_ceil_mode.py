"""Pools that round the number of windows up, at sizes that are dynamic."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.check import check

SIZES = ((9, 9, 9), (12, 11, 10), (7, 8, 6), (10, 7, 9))
#: Kernel, stride and padding: within the map, wider than it, longer than the kernel, up to the padding behind.
WINDOWS = [(2, 2, 0), (3, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0), (3, 3, 1), (50, 50, 0)]


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("kind", ["max", "indices", "average", "average with padding"])
def test_windows(kind: str, window: tuple[int, int, int], axes: int) -> None:
    kernel, stride, padding = window
    pool = getattr(functional, f"{'avg' if 'average' in kind else 'max'}_pool{axes}d")
    options = {
        "average": {"count_include_pad": False},
        "average with padding": {},
        "indices": {"return_indices": True},
        "max": {},
    }[kind]
    inputs = [torch.randn(2, 3, *sizes[:axes]) for sizes in SIZES]
    try:
        pool(inputs[0], kernel, stride, padding, ceil_mode=True, **options)
    except RuntimeError:
        pytest.skip("torch takes no such window")
    program = check(
        lambda x: pool(x, kernel, stride, padding, ceil_mode=True, **options),
        inputs[0],
        others=[(x,) for x in inputs[1:]],
        dynamic=({0: "batch", **{axis + 2: f"size{axis}" for axis in range(axes)}},),
    )
    if stride <= kernel - padding and kind != "indices" and not (kind == "average with padding" and padding):
        assert "Pad" not in {node.op_type for node in program.model.graph}


def test_a_max_pool_of_one_axis_without_gradient() -> None:
    """torch's kernel takes plain sizes alone where there is no gradient."""
    inputs = [torch.randn(b, 3, n) for b, n in ((2, 9), (3, 12), (1, 5))]
    for module in (torch.nn.MaxPool1d(4), torch.nn.MaxPool1d(3, 2, 1, 2), torch.nn.MaxPool1d(2, ceil_mode=True)):
        check(module, inputs[0], others=[(x,) for x in inputs[1:]], dynamic=({0: "batch", 2: "length"},))
