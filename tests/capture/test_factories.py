"""Functions of torch that make tensors with as many elements as a dynamic size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import onnxplug
from onnxplug.errors import FixedDimensionError
from tests.support.check import check

SIZES = (1, 2, 3, 8)
Model = Callable[[Tensor], Any]


def numbers(size: int) -> Tensor:
    return torch.arange(float(size)) * 0.3 - 1


def compare(model: Model, **options: Any) -> None:
    """Checks a model with an example of five elements, and at other sizes."""
    check(model, numbers(5), others=[(numbers(n),) for n in SIZES], dynamic=({0: "n"},), **options)


WINDOWS: dict[str, Callable[..., Tensor]] = {
    "bartlett": torch.bartlett_window,
    "blackman": torch.blackman_window,
    "hamming": torch.hamming_window,
    "hann": torch.hann_window,
    "kaiser": torch.kaiser_window,
}


@pytest.mark.parametrize(
    "options", [{}, {"periodic": False}, {"dtype": torch.float64}], ids=lambda o: "-".join(o) or "default"
)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, options: dict[str, Any]) -> None:
    compare(lambda x: x * WINDOWS[name](x.shape[0], **options), atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.hamming_window(x.shape[0] + 2, True, 0.4, 0.6),
        lambda x: torch.kaiser_window(x.shape[0] // 2 + 1, False, 5.0),
        lambda x: torch.hann_window(window_length=2 * x.shape[0]),
    ],
    ids=["hamming", "kaiser", "hann"],
)
def test_windows_with_all_arguments(model: Model) -> None:
    compare(model, atol=1e-6)


NAMED = torch.hann_window


def test_a_function_imported_under_another_name() -> None:
    compare(lambda x: x * NAMED(x.shape[0]), atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "exponential", "gaussian", "hann", "nuttall", "kaiser"])
def test_windows_of_torch_signal(name: str) -> None:
    window = getattr(torch.signal.windows, name)
    others = [(numbers(n),) for n in SIZES if n > 1]  # these ask whether the length is 1
    check(lambda x: x * window(x.shape[0]), numbers(5), others=others, dynamic=({0: "n"},), atol=1e-6)


MADE: dict[str, Model] = {
    "linspace of integers": lambda x: torch.linspace(-10.5, 30, x.shape[0], dtype=torch.int64),
    "logspace": lambda x: torch.logspace(-1, 2, x.shape[0]),
    "logspace, base": lambda x: torch.logspace(0, 3, steps=x.shape[0] + 1, base=2.0, dtype=torch.float64),
    "fftfreq": lambda x: torch.fft.fftfreq(x.shape[0], d=0.5),
    "rfftfreq": lambda x: torch.fft.rfftfreq(x.shape[0]),
    "tril_indices": lambda x: torch.tril_indices(x.shape[0], x.shape[0]),
    "tril_indices, wide": lambda x: torch.tril_indices(3, x.shape[0], 1),
    "tril_indices, narrow": lambda x: torch.tril_indices(x.shape[0], 3, offset=-1, dtype=torch.int32),
    "triu_indices": lambda x: torch.triu_indices(x.shape[0], x.shape[0], offset=1),
    "triu_indices, wide": lambda x: torch.triu_indices(3, x.shape[0], -2),
    "upper triangle": lambda x: (x[:, None] * x)[tuple(torch.triu_indices(x.shape[0], x.shape[0], 1))],
    "one_hot": lambda x: functional.one_hot(torch.zeros(4, dtype=torch.int64), num_classes=x.shape[0]),
    "vander": torch.vander,
    "vander of integers": lambda x: torch.vander((x * 3).int(), 4, increasing=True),
    "vander, columns": lambda x: torch.vander(x[:1], N=x.shape[0]),
    "combinations": torch.combinations,
    "combinations of 3": lambda x: torch.combinations(x, 3),
    "combinations with replacement": lambda x: torch.combinations(x, 2, with_replacement=True),
    "combinations of 1": lambda x: torch.combinations(x, r=1),
    "as_tensor": lambda x: torch.as_tensor([[x.shape[0] // 2, 1], [2, x.shape[0]]], dtype=torch.int32),
    "as_tensor of quotients": lambda x: torch.as_tensor([x.shape[0] / 2, 1.5]),
    "as_tensor of one": lambda x: torch.as_tensor(x.shape[0]),
    "asarray": lambda x: torch.asarray([x.shape[0], 3]),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_made_of_a_size(name: str) -> None:
    compare(MADE[name])


HALVES: dict[str, Callable[..., Tensor]] = {
    **WINDOWS,
    "linspace": lambda n, dtype: torch.linspace(-1, 3, n, dtype=dtype),
    "linspace to a size": lambda n, dtype: torch.linspace(0.5, n - 0.5, n, dtype=dtype),
    "linspace of tensors": lambda n, dtype: torch.linspace(
        torch.tensor(0.1), torch.tensor(9, dtype=dtype), n, dtype=dtype
    ),
    "logspace": lambda n, dtype: torch.logspace(-1, 2, n, dtype=dtype),
    "fftfreq": lambda n, dtype: torch.fft.fftfreq(n, 0.5, dtype=dtype),
    "rfftfreq": lambda n, dtype: torch.fft.rfftfreq(n, 0.5, dtype=dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_as_near_to_the_doubles_as_torchs_own(name: str, dtype: torch.dtype) -> None:
    make = HALVES[name]
    program = onnxplug.to_onnx(lambda x: make(x.shape[0], dtype=dtype), (numbers(5),), dynamic_shapes=({0: "n"},))
    for size in (5, *SIZES, 33, 300):
        (made,), own, exact = program(numbers(size)), make(size, dtype=dtype), make(size, dtype=torch.float64)
        assert (made.shape, made.dtype) == (own.shape, dtype)
        unit = torch.finfo(dtype).eps * exact.abs().max()
        assert (made.double() - exact).abs().max() <= 0.75 * unit
        assert (own.double() - exact).abs().max() <= 2.5 * unit  # the allowance for torch's own rounding


GENERATOR = torch.Generator().manual_seed(0)
DRAWN: dict[str, tuple[Model, float, float]] = {
    "rand": (lambda x: torch.rand(x.shape[0], 300, generator=GENERATOR), 0, 1),
    "rand of a tuple": (lambda x: torch.rand(size=(x.shape[0], 300), generator=GENERATOR), 0, 1),
    "randn": (lambda x: torch.randn((x.shape[0], 300), generator=GENERATOR, dtype=torch.float64), -9, 9),
    "randint": (lambda x: torch.randint(2, 9, (x.shape[0], 300), generator=GENERATOR, dtype=torch.int32), 2, 8),
    "randint below a size": (lambda x: torch.randint(x.shape[0], (x.shape[0], 300), generator=GENERATOR), 0, 8),
    "randperm": (lambda x: torch.randperm(x.shape[0], generator=GENERATOR), 0, 8),
    "rand by None": (lambda x: torch.rand(x.shape[0], 300, generator=None), 0, 1),
    "randn by None": (lambda x: torch.randn((x.shape[0], 300), generator=None, dtype=torch.float64), -9, 9),
    "randint by None": (lambda x: torch.randint(2, 9, (x.shape[0], 300), generator=None, dtype=torch.int32), 2, 8),
    "randperm by None": (lambda x: torch.randperm(x.shape[0], generator=None), 0, 8),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_by_a_generator_of_a_dynamic_size(name: str) -> None:
    draw, low, high = DRAWN[name]
    program = onnxplug.to_onnx(draw, (numbers(5),), dynamic_shapes=({0: "n"},))
    for size in (5, 9):
        (drawn,), expected = program(numbers(size)), draw(numbers(size))
        assert (drawn.shape, drawn.dtype) == (expected.shape, expected.dtype)
        assert low <= drawn.min()
        assert drawn.max() <= high
        assert drawn.unique().numel() > min(size - 1, 4)
    if name.startswith("randint"):
        assert drawn.max() == 8  # of 2,700 numbers


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch._shape_as_tensor(x),
        lambda x: torch._shape_as_tensor(x[0, 0]),
        lambda x: torch._shape_as_tensor(input=x)[:2] * 2,
        lambda x: x.reshape((*torch._shape_as_tensor(x)[:1].tolist(), -1)),
    ],
    ids=["shape", "no axes", "computed with", "reshape"],
)
def test_shape_as_tensor(model: Model) -> None:
    program = onnxplug.to_onnx(model, (torch.randn(3, 5),), dynamic_shapes=({0: "b", 1: "n"},))
    for sizes in ((3, 5), (1, 7), (2, 1)):
        x = torch.randn(sizes)
        torch.testing.assert_close(program(x)[0], model(x))


REFUSED: dict[str, Model] = {
    "pieces": lambda x: x.chunk(x.shape[0])[0],
    "tensor_split": lambda x: x.tensor_split(x.shape[0])[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_take_a_plain_int_are_named(name: str) -> None:
    with pytest.raises(
        FixedDimensionError, match=r"axis 0 of .* was declared dynamic.*test_factories\.py:\d+ fixes it at 5 \(`"
    ):
        onnxplug.to_onnx(REFUSED[name], (numbers(5),), dynamic_shapes=({0: "n"},))


def test_the_line_is_not_that_of_an_operator_with_the_same_number() -> None:
    def model(x: Tensor) -> Tensor:
        scale = functional.layer_norm(torch.ones(3, 5) * x.sum(), [5]).sum()
        length = x.shape[0] // 2 + 3  # 5, too
        return scale + functional.avg_pool1d(torch.ones(1, 9) * x.sum(), length)

    first = model.__code__.co_firstlineno
    with pytest.raises(FixedDimensionError, match=rf"test_factories\.py:{first + 3} fixes it.* == 5 a constant"):
        onnxplug.to_onnx(model, (numbers(5),), dynamic_shapes=({0: "n"},))


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.LongTensor([x.shape[0] // 2, 7]),
        lambda x: torch.Tensor([x.shape[0] / 3, 7.0]),
        lambda x: torch.DoubleTensor([x.shape[0] / 2]),
    ],
    ids=["LongTensor", "Tensor", "DoubleTensor"],
)
def test_numbers_within_constant_tensors_are_named(model: Model) -> None:
    """torch's strict mode makes a tensor of the example's numbers."""
    with pytest.raises(FixedDimensionError, match="was declared dynamic"):
        onnxplug.to_onnx(model, (numbers(5),), dynamic_shapes=({0: "n"},))
