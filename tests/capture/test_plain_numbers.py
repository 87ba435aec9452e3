"""``int(size)``, ``int(tensor)`` and other functions of Python that return plain numbers have results in the graph."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.check import check

INT = int


#: Numbers computed from the sizes b and n.
SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "int(n)": lambda b, n: int(n),
    "int of a negative quotient": lambda b, n: int(-n / 4),
    "int of a float": lambda b, n: int(n * -0.3) + int(n * 0.7),
    "int of a condition": lambda b, n: int(n > 5) + int(b == n),
    "float": lambda b, n: float(n) / float(b),
    "float of a condition": lambda b, n: float(n > 5),
    "divmod": lambda b, n: math.prod(divmod(n, 4)) + divmod(-n, 4)[1] + divmod(n, b)[0],
    "square root": lambda b, n: sqrt(n) + math.sqrt(float(b)),
    "int of a root": lambda b, n: int(math.sqrt(n * n)),
    "largest of three": lambda b, n: max(b, n, 4) - min(n, 7, b),
    "largest of a list": lambda b, n: max([b, n, 4]) + min((b, n)),
    "largest by a key": lambda b, n: max([3, 4], key=lambda number: -number) + max((), default=2) + n,
    "map": lambda b, n: math.prod(map(int, (b, n / 2))),
    "in a generator": lambda b, n: sum(int(size * 0.5) for size in (b, n)),
    "in a comprehension": lambda b, n: sum([int(size * 0.5) for size in (b, n)]),
    "in a function of a function": lambda b, n: (lambda number: (lambda: int(number * 1.5))())(n),
    "of plain numbers": lambda b, n: n + int("3") + int("11", 2) + int("7", base=8) + float("2"),
    "the class": lambda b, n: n * (2 if isinstance(n, int) and int is INT and type(b) is int and int(n) else 3),
}
#: Results computed from a tensor's values.
VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "int of an index": lambda x: x * int(x.argmax()),
    "int of a float": lambda x: x * int(x.sum() * 10) + int(-x.sum() * 10),
    "int of an item": lambda x: x.new_ones(int(x.abs().sum().item())),
    "int of a condition": lambda x: x * (1 + int(x.sum() > 0)) + int((x.sum() < 0).item()),
    "float": lambda x: x * float(x.sum()) + float((x > 0).sum()) + float(x.sum() > 0),
    "a size": lambda x: x[:, : int((x[0] > 0).sum())],
    "a range": lambda x: torch.arange(int(x.abs().sum())),
    "an index": lambda x: x[int(x[:, 0].argmax())],
    "a constant": lambda x: x * int(torch.tensor(3)) * float(torch.tensor([[2.5]])),
    "the dtype": lambda x: torch.zeros(int((x > 0).sum()), dtype=int) + x.to(int).sum(),  # type: ignore[arg-type]
}


class _Model(nn.Module):
    def __init__(self, number: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number(x.shape[0], x.shape[1])


def test_number_of_elements_of_a_shape() -> None:
    before = torch.Size.numel
    others = [(torch.randn(*sizes),) for sizes in ((4, 4), (1, 9), (7, 1))]
    program = check(
        lambda x: x * x.shape.numel() + x[1:].shape.numel() + torch.Size([2, 3]).numel(),
        torch.randn(2, 6),
        others=others,
        dynamic=({0: "b", 1: "n"},),
    )
    assert program.captured is not None
    assert program.captured.strategy == "non-strict"
    assert torch.Size.numel is before
    assert torch.randn(3, 4).shape.numel() == 12


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    code = SIZES[name].__code__
    others = [(torch.randn(*sizes),) for sizes in ((4, 4), (1, 9), (7, 1), (6, 32))]
    program = check(_Model(SIZES[name]), torch.randn(2, 6), others=others, dynamic=({0: "b", 1: "n"},))
    assert program.captured is not None
    assert program.captured.strategy == "non-strict"
    assert SIZES[name].__code__ is code
    assert math.sqrt is sqrt is inspect.getmodule(math.sqrt).sqrt  # type: ignore[union-attr]


_SLICED = pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    strict=True,
    reason="torch 2.9 asks how long a slice up to a number of a tensor is",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[_SLICED] * (name == "a size")) for name in VALUES])
def test_values(name: str) -> None:
    others = [(torch.randn(*sizes),) for sizes in ((4, 4), (1, 9), (7, 3))]
    program = check(VALUES[name], torch.randn(2, 6), others=others, dynamic=({0: "b", 1: "n"},))
    assert program.captured is not None
    assert program.captured.strategy == "non-strict"


LIMITS: dict[str, Callable[[int], Any]] = {
    "at least one": lambda n: max(1, n),
    "at most one": lambda n: min(n, 1),
    "less one": lambda n: max(n - 1, 0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_a_size_ask_for_a_size_that_is_not_0(name: str) -> None:
    """Torch takes every size for positive, and simplifies ``max(1, n)`` to ``n``."""
    limit = LIMITS[name]

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sum() / limit(x.shape[0]), x.new_ones(limit(x.shape[0]))

    x, others = torch.randn(3, 2), [(torch.randn(1, 2),), (torch.randn(5, 2),)]
    with pytest.warns(UserWarning, match=r"right only where n != 0: the model's code at .*test_plain_numbers"):
        check(Model(), x, others=others, dynamic=({0: "n"},))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Model(), x, others=others, dynamic=({0: torch.export.Dim("n", min=1)},))
        check(lambda x: x.sum() / max(3, x.shape[0], 1), x, others=[*others, (torch.randn(0, 2),)], dynamic=({0: "n"},))


def test_a_limit_of_a_product_names_each_size() -> None:
    dynamic = ({0: "a", 1: "b"},)
    with pytest.warns(UserWarning, match="right only where") as caught:
        check(lambda x: x.sum() / max(1, x.shape[0] * x.shape[1]), torch.randn(3, 2), dynamic=dynamic)
    said = [str(warning.message) for warning in caught]
    assert all(any(f"right only where {name} != 0" in text for text in said) for name in "ab"), said


def test_a_frame_that_outlives_the_capture() -> None:
    begun = []

    def numbers(n: Any) -> Any:
        yield int(n)
        yield int("3") + max(2, 1)

    def model(x: torch.Tensor) -> torch.Tensor:
        begun.append(numbers(x.shape[1]))
        return x * next(begun[-1])

    check(model, torch.randn(2, 6), others=[(torch.randn(2, 9),)], dynamic=({1: "n"},))
    assert [next(generator) for generator in begun] == [5] * len(begun)
    assert len(begun) > 2


def test_code_with_more_names_than_a_byte_counts() -> None:
    """Code with so many names stays as it is; the strict mode captures it."""
    text = "; ".join(f"a{number}" for number in range(200))
    namespace: dict[str, Any] = {f"a{number}": number for number in range(200)}
    exec(f"def number(b, n):\n    {text}\n    return int(n * 1.5)", namespace)
    check(_Model(namespace["number"]), torch.randn(2, 6), others=[(torch.randn(3, 9),)], dynamic=({0: "b", 1: "n"},))
    assert namespace["number"].__code__.co_names[-1] == "int"
