"""Integers of 64 bits whose lower halves have the highest bit: ONNX Runtime's comparisons of them, in exports of the default kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.check import check

EDGES = [
    0,
    1,
    -1,
    471,
    *(sign * 2**power + more for sign in (1, -1) for power in (31, 32, 40, 62) for more in (-1, 0, 5)),
]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Enough numbers for ONNX Runtime's kernels of several numbers at once."""
    pool = torch.tensor([*EDGES, 2**32 + 2**31, 2**63 - 1, -(2**63)])
    return pool[torch.randint(len(pool), shape, generator=torch.Generator().manual_seed(seed))]


X, Y = drawn(0, 6, 37), drawn(1, 6, 37)
#: Times in milliseconds, on both sides of a multiple of 2**31.
TIMES = 2**40 + 2**31 + torch.arange(-111, 111).reshape(6, 37)
OF_ONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "clamp": lambda x: (x.clamp(-10, 471), x.clamp(2**31, 2**33), x.clamp(min=2**31), x.clamp(max=-(2**32))),
    "clamp to all": lambda x: (x.clamp(-(2**63), 2**63 - 1), torch.clip(x, 0), x.clamp(9, -9)),
    "activations": lambda x: (x.relu(), F.relu6(x), F.hardtanh(x, -5, 471)),
    "sign": lambda x: (x.sign(), x.sgn()),
    "largest": lambda x: (
        x.amax(1),
        x.amax(0, keepdim=True),
        x.amax((0, 1)),
        x.max(),
        x.max(1),
        x.amax((0, 1), keepdim=True),
    ),
    "smallest": lambda x: (x.amin(-1, keepdim=True), x.amin(0), x.amin(), x.min(), x.min(0, keepdim=True)),
    "both": lambda x: (x.aminmax(dim=1), x.aminmax()),
    "of three axes": lambda x: (x.reshape(6, -1, 1).amax((0, 2)), x.reshape(2, 3, -1).amin((0, 1))),
    "running": lambda x: (x.cummax(1), x.cummin(0)),
    "order": lambda x: (x.sort(1)[0], x.topk(3)[0], x.median(1)[0]),
    "unsigned": lambda x: (x & 0xFFFFFFFF).to(torch.uint32).to(torch.int64).amax(1),
}
OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "extrema": lambda x, y: (x.maximum(y), x.minimum(y), torch.max(x, y), x.fmax(y), x.fmin(y)),
    "clamp": lambda x, y: (x.clamp(min=y), x.clamp(max=y), x.clamp(y, y + 1)),
    "a row": lambda x, y: (x.maximum(y[0]), x.minimum(y[:, :1])),
    "scattered": lambda x, y: x.scatter_reduce(1, torch.arange(37).expand(6, 37) // 2, y, "amax"),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_one(name: str) -> None:
    check(OF_ONE[name], X, others=[(Y,), (TIMES,)])


@pytest.mark.parametrize("name", OF_TWO)
def test_two(name: str) -> None:
    check(OF_TWO[name], X, Y, others=[(Y, X), (TIMES, TIMES.flip(1))])


def test_sizes() -> None:
    """Of a single number and of none."""
    for x in (X[0, 0], X[:0]):
        check(lambda x: (x.clamp(-10, 471), x.maximum(x + 2**31), x.sign()), x, others=[(x,)])
    check(lambda x: (x.max(), x.amax(), x.aminmax()), X[0, 4], others=[(X[0, 5],)])
    check(lambda x: (x.amax(1), x.amin(1, keepdim=True)), X[:0], others=[(X[:0],)])


def test_divisors() -> None:
    """The loop goes on until every remainder is 0."""
    x = torch.tensor([4] * 34 + [2**32 + 2**31 + 8] * 30 + [4] * 40)
    y = torch.tensor([4] * 34 + [2**32] * 30 + [4] * 40)
    check(torch.gcd, x, y, others=[(y, x)])
