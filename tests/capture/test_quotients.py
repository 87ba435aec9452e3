"""Quotients of sizes have the value that they have in Python, and are found quickly."""

from __future__ import annotations

import random

import pytest
import sympy
import torch
from torch.utils._sympy import functions

import onnxplug
from onnxplug.patches.quotients import cancelled, quotients_cancelled

N, H, W = sympy.symbols("n h w", integer=True, positive=True)


def _expression(choose: random.Random, depth: int) -> sympy.Expr:
    """A random size of the forms that layers make."""
    if depth == 0:
        return choose.choice([N, H, W, sympy.Integer(choose.randrange(1, 9))])
    first, second = (_expression(choose, depth - 1) for _ in range(2))
    number = choose.randrange(2, 6)
    return choose.choice(
        [
            lambda: first * second,
            lambda: first + second * number,
            lambda: number * first,
            lambda: functions.FloorDiv(first + choose.randrange(4), number) + 1,
            lambda: functions.FloorDiv(first * second, second),
        ]
    )()


def test_values_stay() -> None:
    """With and without the patch, quotients of random sizes have one value."""
    choose = random.Random(0)
    for _ in range(150):
        factor, sizes = _expression(choose, 1), [_expression(choose, choose.randrange(3)) for _ in range(3)]
        dividend, divisor = sizes[0] * factor + choose.randrange(2) * sizes[1] * factor, sizes[2] * factor
        with quotients_cancelled():
            quotient = functions.FloorDiv(dividend, divisor)
        for _ in range(4):
            values = {symbol: sympy.Integer(choose.randrange(1, 40)) for symbol in (N, H, W)}
            assert quotient.xreplace(values) == dividend.xreplace(values) // divisor.xreplace(values)


def test_a_common_factor_cancels_term_by_term() -> None:
    rows = functions.FloorDiv(H + 1, 2)
    assert cancelled((rows * N + rows * W * 2) / rows) == N + 2 * W
    assert cancelled(N * rows * 4 / (2 * rows)) == 2 * N
    assert cancelled((N**2 - W**2) / (N + W)) == N - W  # by sympy
    assert cancelled(N / 2) == N / 2
    assert cancelled(N * (rows + 1) * (2 * H + 2) / ((2 * rows + 2) * (H + 1))) == N


def test_sizes_of_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last axis is found from the number of elements, without a search of sympy for simpler forms."""

    def simplify(expr: sympy.Expr) -> sympy.Expr:
        raise AssertionError(f"sympy simplifies {expr}")

    monkeypatch.setattr(sympy, "simplify", simplify)

    def model(x: torch.Tensor) -> torch.Tensor:
        for kernel in (3, 2, 3):
            x = torch.nn.functional.max_pool2d(x, kernel, 2, padding=1)
        batch, channels, height, width = x.shape
        windows = x.reshape(batch, channels, height, width, 1).transpose(1, 3).reshape(batch * width, height, -1)
        return windows.view(-1, width, height, channels).flatten(1).view(batch, -1, channels, height * width)

    x = torch.randn(2, 4, 40, 56)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "n", 2: "h", 3: "w"},))
    for size in ((1, 4, 33, 90), (3, 4, 16, 9)):
        y = torch.randn(size)
        torch.testing.assert_close(program(y)[0], model(y))
