"""Sizes rounded up to a multiple: however code writes them, one expression with the value that Python computes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy import functions

import onnxplug
from onnxplug.patches.padded_sizes import sizes_rounded_up

N, H = sympy.Symbol("n", integer=True), sympy.Symbol("h", integer=True, nonnegative=True)


def _ceiling(size: Any, divisor: Any) -> Any:
    return functions.CeilToInt(functions.IntTrueDiv(size, divisor))


def test_one_form_of_each_padding() -> None:
    with sizes_rounded_up():
        padded = 7 * functions.FloorDiv(H + 6, 7)
        paddings = [
            functions.PythonMod(-H, 7),
            functions.PythonMod(7 - functions.Mod(H, 7), 7),
            functions.Mod(21 - functions.PythonMod(H, 7), 7),
            -7 * functions.FloorDiv(-H, 7) - H,
            7 * _ceiling(H, 7) - H,
        ]
        assert [H + padding for padding in paddings] == [padded] * len(paddings)
        assert functions.FloorDiv(padded, 7) == functions.FloorDiv(H + 6, 7)
        # Convolutions of the kernels 3 and 1 that keep a size but for their stride.
        assert functions.Max(2 * _ceiling(H, 2) + 1 - H, 0) == 2 * functions.FloorDiv(H + 1, 2) + 1 - H
        assert functions.Max(4 * _ceiling(H, 4) - 3 - H, 0) == 0
        assert functions.Min(H, padded) == H
        # Neither operand is the larger of the two for every size.
        assert functions.Max(4 * _ceiling(H, 4) - 1 - H, 0).has(functions.Max)
        assert functions.Min(7 * functions.FloorDiv(H, 7) + 3, H).has(functions.Min)


def test_one_form_of_each_quotient() -> None:
    """Sizes after convolutions and pools with strides: one quotient for any number of layers."""
    with sizes_rounded_up():
        convolved = pooled = H
        for _ in range(5):
            convolved, pooled = functions.FloorDiv(convolved + 2 - 3, 2) + 1, functions.FloorDiv(pooled - 2, 2) + 1
        assert convolved == functions.FloorDiv(H + 31, 32)
        assert pooled == functions.FloorDiv(H, 32)
        assert functions.FloorDiv(convolved - 7, 3) == functions.FloorDiv(H + 31 + 2 * 32, 96) - 3
        assert functions.FloorDiv(N + 20, 7) == functions.FloorDiv(N + 6, 7) + 2
        assert functions.FloorDiv(N - 1, -7).args == (N - 1, -7)


def test_other_expressions_stay() -> None:
    with sizes_rounded_up():
        assert isinstance(functions.PythonMod(H - N, 7), functions.PythonMod)
        assert isinstance(functions.PythonMod(3 - H, 7), functions.PythonMod)
        assert isinstance(functions.FloorDiv(3 - H, 7), functions.FloorDiv)
        assert isinstance(functions.PythonMod(-H, N), functions.PythonMod)
        assert isinstance(_ceiling(H * N, 7), functions.CeilToInt)  # not exact above 2**53
        assert isinstance(_ceiling(functions.FloorDiv(H * N, 2), 7), functions.CeilToInt)
        assert isinstance(_ceiling(H**3 + 1, 7), functions.CeilToInt)
        assert isinstance(_ceiling(2**40 * H, 7), functions.CeilToInt)
    assert isinstance(functions.PythonMod(-H, 7), functions.PythonMod)
    assert functions.Max.__new__ is functions.Min.__new__


def _python_ceiling(size: int, divisor: int) -> int:
    return math.ceil(size / divisor)


#: torch's expressions, and the functions of Python's ints that they stand for.
_OPERATIONS: list[tuple[Callable[..., Any], Callable[..., int]]] = [
    (functions.PythonMod, lambda a, b: a % b),
    (functions.FloorDiv, lambda a, b: a // b),
    (_ceiling, _python_ceiling),
]


def _tree(choose: random.Random, depth: int) -> Callable[[Any, bool], Any]:
    """A size as code computes it: a function of another size, of an expression if the flag is true, else of an int."""
    if depth == 0:
        return lambda size, is_symbolic: size
    inner, other = _tree(choose, depth - 1), _tree(choose, choose.randrange(depth))
    number, divisor = choose.randrange(-9, 10), choose.randrange(1, 9)
    operation = choose.choice(_OPERATIONS)
    of_multiple = divisor * choose.randrange(3)

    def call(size: Any, is_symbolic: bool) -> Any:
        return operation[not is_symbolic](size, sympy.Integer(divisor) if is_symbolic else divisor)

    def largest(first: Any, second: Any, is_symbolic: bool) -> Any:
        return functions.Max(first, second) if is_symbolic else max(first, second)

    def smallest(first: Any, second: Any, is_symbolic: bool) -> Any:
        return functions.Min(first, second) if is_symbolic else min(first, second)

    return choose.choice(
        [
            lambda s, e: call(inner(s, e), e),
            lambda s, e: call(-inner(s, e), e),
            lambda s, e: call(inner(s, e) + number, e),
            lambda s, e: call(of_multiple - inner(s, e), e),
            lambda s, e: call(of_multiple - call(inner(s, e), e), e),
            lambda s, e: inner(s, e) + number,
            lambda s, e: other(s, e) - divisor * call(inner(s, e), e),
            lambda s, e: largest(divisor * call(inner(s, e), e) - inner(s, e) + number, 0, e),
            lambda s, e: largest(inner(s, e) + number - divisor * call(inner(s, e), e), number, e),
            lambda s, e: largest(inner(s, e), other(s, e), e),
            lambda s, e: -largest(-inner(s, e), -divisor * call(inner(s, e) + number, e), e),
            lambda s, e: smallest(inner(s, e), divisor * call(inner(s, e) + number, e), e),
        ]
    )


@pytest.mark.parametrize("symbol", [N, H], ids=["any number", "size"])
def test_values_are_those_of_python(symbol: Any) -> None:
    """Random sizes, at negative numbers too where a symbol has no sign."""
    choose = random.Random(0)
    for _ in range(500):
        tree = _tree(choose, choose.randrange(1, 5))
        with sizes_rounded_up():
            expr = tree(symbol, True)
        for _ in range(8):
            number = choose.randrange(0 if symbol.is_nonnegative else -60, 60)
            assert sympy.sympify(expr).xreplace({symbol: sympy.Integer(number)}) == tree(number, False), (expr, number)


class _KeepingSizes(nn.Module):
    """Convolutions as TensorFlow pads them: the result has the operand's size divided by the stride, rounded up."""

    def __init__(self, kernels: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, kernel, stride=2 - i % 2) for i, kernel in enumerate(kernels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            ends: list[int] = []
            for size, kernel, stride in zip(x.shape[:1:-1], layer.kernel_size, layer.stride, strict=True):
                pad = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
                ends += [pad // 2, pad - pad // 2]
            x = layer(nn.functional.pad(x, ends)).tanh()
        return x


def test_convolutions_that_keep_sizes() -> None:
    torch.manual_seed(0)
    model = _KeepingSizes([3, 3, 1, 5, 3, 3, 5]).eval()
    x = torch.randn(2, 3, 70, 45)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "n", 2: "h", 3: "w"},))
    assert str(program.model.graph.outputs[0].shape[3]).count("w") == 1
    for size in ((1, 3, 64, 33), (3, 3, 1, 17), (1, 3, 16, 100)):
        program.verify(args=(torch.randn(size),))


class _Windows(nn.Module):
    """Windows of an image that is padded to a multiple of their side, each as far as ``padding`` says."""

    def __init__(self, padding: Callable[[int], int]) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, h, w, c = x.shape
        x = nn.functional.pad(x, (0, 0, 0, self.padding(w), 0, self.padding(h)))
        _, rows, columns, _ = x.shape
        x = x.view(n, rows // 7, 7, columns // 7, 7, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 7, 7, c)
        x = x.softmax(1).view(n, rows // 7, columns // 7, 7, 7, -1).permute(0, 1, 3, 2, 4, 5).contiguous()
        return x.view(n, rows, columns, -1)[:, :h, :w].contiguous().view(n, h * w, c)


@pytest.mark.parametrize("example", [(2, 12, 5, 3), (2, 9, 12, 3), (1, 7, 7, 3), (2, 3, 4, 3)], ids=str)
@pytest.mark.parametrize(
    "padding",
    [lambda n: -n % 7, lambda n: (7 - n % 7) % 7, lambda n: math.ceil(n / 7) * 7 - n, lambda n: -(-n // 7) * 7 - n],
    ids=["remainder", "difference", "ceil", "quotient"],
)
def test_windows(padding: Callable[[int], int], example: tuple[int, ...]) -> None:
    """Windows also of an example with one window a row, where a copy in memory order is the operand itself."""
    sizes = ({0: "n", 1: "h", 2: "w"},)
    program = onnxplug.to_onnx(_Windows(padding), (torch.randn(example),), dynamic_shapes=sizes)
    assert [str(d) for d in program.model.graph.inputs[0].shape] == ["n", "h", "w", "3"]
    for size in ((1, 7, 7, 3), (3, 14, 1, 3), (1, 8, 20, 3)):
        program.verify(args=(torch.randn(size),))
