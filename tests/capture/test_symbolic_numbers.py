"""Sizes, and numbers read from tensors, beside numbers of every class: as Python computes them, or a warning names the line."""

from __future__ import annotations

import enum
import fractions
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug


class Known(enum.IntEnum):
    FIVE = 5
    SEVEN = 7


class Kept(int):
    """A subclass that only adds."""

    unit = "pixels"


class Modular(int):
    """A subclass with an equality of its own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other % 3 == int(self) % 3

    def __hash__(self) -> int:
        return 0


class Length(float):
    """A subclass that only adds."""


class Flag:
    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on


class Applied(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


#: Functions of a size, 5 in the example, with numbers of several kinds and in several places.
CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "enumeration": lambda x: x * 2 if x.shape[0] == Known.FIVE else x,
    "enumeration at the left": lambda x: x * 2 if x.shape[0] == Known.FIVE else x,
    "another member": lambda x: x * 2 if x.shape[0] != Known.FIVE else x,
    "greater": lambda x: x * 2 if x.shape[0] > Known.FIVE else x,
    "sum": lambda x: x * (x.shape[0] + Known.FIVE),
    "difference": lambda x: x * (Known.SEVEN - x.shape[0]),
    "among members": lambda x: x * 2 if x.shape[0] in list(Known) else x,
    "in a shape": lambda x: x * 2 if x.shape == (Known.FIVE, 4) else x,
    "subclass": lambda x: x * 2 if x.shape[0] == Kept(5) else x,
    "equality of its own": lambda x: x * 2 if x.shape[0] == Modular(8) else x,
    "float": lambda x: x * 2 if x.shape[0] == Length(5) else x,
    "product": lambda x: x * (x.shape[0] * Length(2.5)),
    "NumPy's": lambda x: x * 2 if x.shape[0] / 2 == np.float64(2.5) else x,
    "complex": lambda x: x * 2 if x.shape[0] == 5 + 0j else x,
    "fraction": lambda x: x * 2 if x.shape[0] / 2 == fractions.Fraction(5, 2) else x,
    "bool": lambda x: x * 2 if x.shape[0] - 4 == True else x,  # noqa: E712
    "condition": lambda x: x * 2 if (x.shape[0] > 4) == 1 else x,
    "condition and bool": lambda x: x * 2 if (x.shape[0] > 4) == True else x,  # noqa: E712
    "conditions": lambda x: x * 2 if (x.shape[0] > 4) == (x.shape[0] > 3) else x,
    "is True": lambda x: x * 2 if (x.shape[0] > 4) is True else x,
    "is not False": lambda x: x * 2 if (x.shape[0] > 4) is not False else x,
    "is True later": lambda x: x * 2 if Flag(x.shape[0] > 4).is_on is True else x,
    "True at the left": lambda x: x * 2 if True is (x.shape[0] > 4) else x,
    "text of a condition": lambda x: x * len(str(x.shape[0] > 4)),
    "text of a float": lambda x: x * len(str(x.shape[0] / 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_other_classes(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """The program is right at the example's size, unless a warning names a text, and at other sizes unless they are refused."""
    model = Applied(CASES[name])
    x = torch.randn(5, 4)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: Dim.AUTO},))
    messages = " ".join(str(w.message) for w in recwarn if issubclass(w.category, UserWarning))
    if name.startswith("text"):
        assert "takes the text of a dynamic size" in messages
        return
    torch.testing.assert_close(program(x)[0], model(x))
    for size in (7, 8, 3):
        other = torch.randn(size, 4)
        try:
            (result,) = program(other)
        except onnxplug.OnnxplugError:
            continue
        if "is right only where" not in messages:
            torch.testing.assert_close(result, model(other))
        else:
            assert "test_symbolic_numbers.py" in messages


#: Functions of numbers read from a tensor, each with its warning.
READ: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item is True": (lambda x: x * 2 if (x.sum() > 0).item() is True else x, "compares by `is`"),
    "item is not False": (lambda x: x * 2 if (x.sum() > 0).item() is not False else x, "compares by `is`"),
    "list is True": (lambda x: x * 2 if (x > 0)[0].tolist()[0] is True else x, "compares by `is`"),
    "comparison is True": (lambda x: x * 2 if (x.sum().item() > 0) is True else x, "compares by `is`"),
    "count is True": (lambda x: x * 2 if True is ((x > 0).sum().item() > 3) else x, "compares by `is`"),
    "later": (lambda x: x * 2 if Flag((x.sum() > 0).item()).is_on is True else x, "compares by `is`"),
    "text of a float": (lambda x: x * len(str(x.sum().item())), "takes the text"),
    "text of an int": (lambda x: x * len(f"{(x > 0).sum().item()}"), "takes the text"),
    "text of a condition": (lambda x: x * len(repr((x.sum() > 0).item())), "takes the text"),
    "text of a tensor": (lambda x: x * len(str(x)), "takes the text"),
    "formatted tensor": (lambda x: x * len(f"{x.sum()}"), "takes the text"),
}


@pytest.mark.parametrize("name", READ)
def test_conditions_and_texts_of_numbers_read_from_tensors_are_a_warning(name: str) -> None:
    function, text = READ[name]
    with pytest.warns(UserWarning, match=rf"test_symbolic_numbers\.py:\d+ .*{text}"):
        onnxplug.to_onnx(Applied(function), (torch.randn(5, 4),))


def refuses_negative_sums(x: torch.Tensor) -> torch.Tensor:
    count = (x > 0).sum().item()
    torch._check(count >= 0)
    torch._check_tensor_all(x.abs().sum(0) >= 0)
    if (x.abs().sum() < 0).item():
        raise ValueError("negative")
    return x * 2 if x.shape[0] is not True else x


def test_conditions_that_code_only_branches_on_are_no_warning() -> None:
    """Other code of the model compares by ``is``, but not with these conditions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(Applied(refuses_negative_sums), (torch.randn(5, 4),))
    program.verify()
    assert not [w for w in caught if "compares by `is`" in str(w.message)]


def test_operators_keep_their_lines_where_code_compares_by_is() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row * 2 for row in x]) if model is not True else x

    with pytest.raises(
        onnxplug.FixedDimensionError, match=r"aten::unbind at \S*test_symbolic_numbers\.py:\d+ fixes it at 5"
    ):
        onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=({0: "rows"},))


def test_a_check_of_a_number_read_from_a_tensor_says_nothing() -> None:
    """No code of the model compares by ``is``, and texts are only printed."""

    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = (x > 0).sum().item()
            torch._check(count <= 20)
            print(x, count)
            return x * count

    model = Checked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (torch.randn(5, 4),))
    for x in (torch.randn(5, 4), torch.randn(5, 4).abs()):
        torch.testing.assert_close(program(x)[0], model(x))


def test_a_condition_stays_symbolic_where_no_code_asks_for_its_value() -> None:
    """torch.cond takes a condition of sizes, and both branches are in the graph."""

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.shape[0] > 4, lambda t: t * 2, lambda t: t - 1, (x,))

    model = Branches()
    program = onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=({0: Dim("rows", min=2)},))
    for size in (5, 3, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(program(x)[0], model(x))


#: Expressions of sizes that torch computes otherwise than Python.
EXPRESSIONS = (
    "n // 0.1",
    "(n / 10) // 0.1",
    "n // -0.3",
    "7.5 // n",
    "n % -0.3",
    "-n % 0.7",
    "7.5 % m",
    "(n / 3) % 1",
    "(n / 3) % -1",
    "(m / 2) % 2",
    "(m / 3) // 0.5",
    "(m / 3) % 1.5",
    "n % 1.0",
    "-n // 2.0",
    "n // 1e300",
    "n % 1e300",
    "((0.5 / n) % 2) % (math.floor(-0.7))",
    "math.floor(m // (m >> 2))",
    "math.ceil(n // 3) * 3 - n",
    "(n & 5) | 8",
    "round(n / 2)",
)


def _expression(choose: random.Random, depth: int) -> str:
    """A random expression of the sizes ``n`` and ``m``."""
    if not depth or choose.random() < 0.15:
        return choose.choice(["n", "m"] * 9 + "1 2 3 5 7 -1 -2 -3 10 0.5 0.1 0.3 2.5 -0.7".split())
    forms = "{a} + {b}|{a} - {b}|{a} * {b}|{a} // {b}|{a} // {b}|{a} % {b}|{a} % {b}|{a} / {b}|{a} ** {c}|{a} >> {c}|{a} << {c}|{a} & {c}"
    calls = "-{a}|abs({a})|min({a}, {b})|max({a}, {b})|round({a})|int({a})|float({a})|math.floor({a})|math.ceil({a})|math.sqrt(abs({a}))"
    form = choose.choice(f"{forms}|{calls}".split("|"))
    a, b = (_expression(choose, depth - 1) for _ in range(2))
    return f"({form.format(a=a, b=b, c=choose.choice([0, 1, 2, 3]))})"


def _check_expression(text: str) -> None:
    """Compares the value of an expression at several sizes; a size may be static, and a condition named by a warning."""
    code = compile(text, __file__, "eval")

    def values(x: torch.Tensor) -> torch.Tensor:
        n, m = x.shape
        return x * eval(code, {"math": math, "n": n, "m": m})

    def expected(sizes: tuple[int, int]) -> torch.Tensor | None:
        try:
            return values(torch.ones(sizes, dtype=torch.float64))
        except (ArithmeticError, TypeError, ValueError):
            return None

    first = (6, 4)
    if expected(first) is None:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.ones(first, dtype=torch.float64)
        try:
            program = onnxplug.to_onnx(Applied(values), (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
        except onnxplug.OnnxplugError:
            return
    has_condition = any("is right only where" in str(w.message) for w in caught)
    for sizes in (first, *(() if has_condition else ((3, 7), (8, 8), (1, 2), (13, 5), (31, 17)))):
        wanted = expected(sizes)
        if wanted is None:
            continue
        try:
            (result,) = program(torch.ones(sizes, dtype=torch.float64))
        except onnxplug.OnnxplugError:
            assert sizes != first
            return
        torch.testing.assert_close(result, wanted, msg=lambda m, sizes=sizes: f"{text} at {sizes}: {m}")


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_arithmetic(text: str) -> None:
    _check_expression(text)


@pytest.mark.parametrize("text", ["(n / 3) % 1", "n % 2.0", "n // 2.0", "(n / 3) // 0.5"])
def test_a_size_stays_dynamic_in_exact_divisions(text: str) -> None:
    code = compile(text, __file__, "eval")
    model = Applied(lambda x: x * eval(code, {"n": x.shape[0]}))
    program = onnxplug.to_onnx(model, (torch.ones(6, 4),), dynamic_shapes=({0: Dim("n")},))
    for size in (1, 2, 7, 11):
        torch.testing.assert_close(program(x := torch.ones(size, 4))[0], model(x))


def test_remainders_of_floats_in_a_program_of_torch() -> None:
    """torch's own program computes ``math.floor(n / 0.1)``; a remainder in it is Python's."""

    class Remainder(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.shape[0] % 0.3) + x.shape[0] % -0.7

    captured = torch.export.export(Remainder(), (torch.ones(6, 4),), dynamic_shapes=({0: Dim("n")},))
    program = onnxplug.to_onnx(captured)
    for size in (1, 2, 7, 11):
        torch.testing.assert_close(program(x := torch.ones(size, 4))[0], Remainder()(x))


@pytest.mark.parametrize("seed", range(12))
def test_random_arithmetic(seed: int) -> None:
    _check_expression(_expression(random.Random(seed), 3))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 600))
def test_more_random_arithmetic(seed: int) -> None:
    test_random_arithmetic(seed)


@pytest.mark.parametrize("wanted", [Dim.DYNAMIC, Dim.AUTO], ids=str)
def test_rounding_to_tens_makes_a_size_constant(wanted: Any) -> None:
    model = Applied(lambda x: x * round(x.shape[0], -1) + round(x.shape[1], 2))
    x = torch.ones(17, 4)
    if wanted is Dim.DYNAMIC:
        with pytest.raises(onnxplug.FixedDimensionError, match=r"fixes it at 17"):
            onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: wanted},))
        return
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: wanted, 1: Dim.DYNAMIC},), verify=True)
    for columns in (4, 1, 9):
        torch.testing.assert_close(program(torch.ones(17, columns))[0], model(torch.ones(17, columns)))


def test_rounding_to_digits_is_refused() -> None:
    with pytest.raises(onnxplug.Unsupported, match="round of a size to a number of digits"):
        onnxplug.to_onnx(
            Applied(lambda x: x * round(x.shape[0] / 3, 1)), (torch.ones(5, 4),), dynamic_shapes=({0: Dim.DYNAMIC},)
        )
