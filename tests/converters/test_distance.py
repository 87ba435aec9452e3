"""Distances between points, of every order, of no points and of points without coordinates."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.check import check

NAN, INF = math.nan, math.inf
ORDERS = (0, 1, 1.5, 2, INF)


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("p", ORDERS)
def test_cdist(p: float) -> None:
    others = [(points(m, width), points(n, width, seed=1)) for m, n, width in ((1, 7, 1), (3, 2, 0), (0, 3, 2))]
    check(lambda x, y: torch.cdist(x, y, p), points(4, 3), points(2, 3, seed=1), others=others, dynamic=True)


@pytest.mark.parametrize("p", ORDERS)
def test_pdist(p: float) -> None:
    others = [(points(n, width),) for n, width in ((1, 3), (3, 1), (4, 0), (0, 2))]
    check(lambda x: torch.pdist(x, p), points(5, 3), others=others, dynamic=True)


@pytest.mark.parametrize("p", [0, 1, 2])
def test_distances_of_nan_and_infinities(p: float) -> None:
    spoilt = torch.tensor([[NAN, 1.0], [INF, 2.0], [-INF, -0.0], [0.0, 2.0]])
    check(lambda x: (torch.cdist(x, x.flip(0), p), torch.pdist(x, p)), points(3, 2), others=[(spoilt,)], dynamic=True)
