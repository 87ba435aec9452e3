"""Code that compares a size to raise an error: the bound is applied with a warning, also where the model goes on."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import onnxplug

Model = Callable[[torch.Tensor], torch.Tensor]
LOCK = threading.Lock()


class Passing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Taking:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> bool:
        return True


@contextlib.contextmanager
def passing() -> Iterator[None]:
    try:
        yield
    finally:
        torch.is_grad_enabled()


@contextlib.contextmanager
def taking() -> Iterator[None]:
    try:  # noqa: SIM105
        yield
    except ValueError:
        pass


def checked(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 0 or x.shape[0] > 8:
        raise ValueError(f"{x.shape}")
    return x + 1


def no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if x.shape[0] == 0:
            raise ValueError("no row")
        return x + 1


def two_managers(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("a"), torch.autocast("cpu", enabled=False):
        return checked(x)


def other_managers(x: torch.Tensor) -> torch.Tensor:
    with contextlib.nullcontext(), Passing(), passing(), warnings.catch_warnings():
        return checked(x)


def locked(x: torch.Tensor) -> torch.Tensor:
    with LOCK:
        return checked(x)


def finally_(x: torch.Tensor) -> torch.Tensor:
    try:
        y = checked(x)
    finally:
        torch.is_grad_enabled()
    return y


def both(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] % 2 == 0 and x.shape[1] == 0:
        raise ValueError("even")
    return x + 1


def nested(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 8:
        if x.shape[1] > 8:
            raise ValueError("both")
        message = "one" if x.shape[1] else "none"
        raise ValueError(message)
    return x + 1


def any_(x: torch.Tensor) -> torch.Tensor:
    if any(n == 0 for n in x.shape) or any(n > 8 for n in x.shape):
        raise ValueError("a size")
    if not all(n > 0 for n in x.shape):
        raise ValueError("another size")
    return x + 1


def member(x: torch.Tensor) -> torch.Tensor:
    if 0 in x.shape or x.shape[0] in (97, 98) or x.shape == (99, 4):
        raise ValueError("a size")
    return x + 1


def torchs_check(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] != 0, lambda: "no row")
    torch._check(x.shape[0] < 9)
    torch._assert(x.shape[0] != 0, "no row")
    return x + 1


#: Each with the conditions that its warnings name.
CHECKS: dict[Model, set[str]] = {
    **{model: {"b <= 8", "b != 0"} for model in (checked, two_managers, other_managers, locked, finally_)},
    no_grad: {"b != 0"},
    both: {"(b % 2) != 0"},
    nested: {"b <= 8"},
    any_: {"b <= 8", "n <= 8", "b != 0", "n != 0", "b > 0", "n > 0"},
    member: {"b != 0", "n != 0", "b != 97", "b != 98", "b != 99"},
}


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("model", CHECKS, ids=lambda model: model.__name__)
def test_a_check_is_reported(model: Model, strict: bool) -> None:
    if strict and model in (locked, other_managers, any_):
        pytest.skip("torch's strict mode refuses these context managers, and interprets any() as a loop that returns")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, (torch.randn(5, 4),), dynamic_shapes=({0: "b", 1: "n"},), strict=strict)
    messages = {str(w.message).partition(" right only where ")[2].partition(": ")[0] for w in caught}
    if strict and model is member:  # the strict mode compares with all members, or with the whole shape, at once
        messages = {"b != 97", "b != 98", "b != 99"} | messages - {
            "not (b == 97 or b == 98)",
            "not (b == 99 and n == 4)",
        }
    assert messages == CHECKS[model]
    for size in ((1, 3), (7, 4)):
        x = torch.randn(size)
        torch.testing.assert_close(program(x)[0], model(x))


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_conditions_of_torchs_own_check_are_not_reported(strict: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(
            torchs_check, (torch.randn(5, 4),), dynamic_shapes=({0: "b", 1: "n"},), strict=strict
        )
    assert not [w for w in caught if "b <= 8" in str(w.message)]
    assert program.model.graph.metadata_props["onnxplug.dimensions"] == '{"b": {"min": 0, "max": 8}}'


def suppressed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ValueError):
        return checked(x)
    return x * 100


def among_two(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), contextlib.suppress(ValueError), torch.no_grad():
        return checked(x)
    return x * 100


def taken(x: torch.Tensor) -> torch.Tensor:
    with Taking():
        return checked(x)
    return x * 100


def taken_by_a_generator(x: torch.Tensor) -> torch.Tensor:
    with taking():
        return checked(x)
    return x * 100


def one_or_the_other(x: torch.Tensor) -> torch.Tensor:
    with Taking() if x.ndim == 2 else Passing():
        return checked(x)
    return x * 100


def of_a_stack(x: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(Taking())
        return checked(x)
    return x * 100


def outer(x: torch.Tensor) -> torch.Tensor:
    try:
        with torch.no_grad():
            return finally_(x)
    except ValueError:
        return x * 100


class Lazy:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def few(self) -> int:
        if self.x.shape[0] > 8:
            raise AttributeError("many")
        return 1


def property_(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if hasattr(Lazy(x), "few") else x * 100


def a_value(x: torch.Tensor) -> torch.Tensor:
    factor = 100 if x.shape[0] > 8 else 1
    if x.shape[1] == 0:
        raise ValueError("none")
    return x * factor


def refused_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    try:
        return x[:, :1].reshape(-1) + x[0]
    except RuntimeError:
        return x * 100


LIMITS: list[Model] = [
    *(suppressed, among_two, taken, taken_by_a_generator, one_or_the_other, of_a_stack, outer, property_, a_value)
]


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("model", LIMITS, ids=lambda model: model.__name__)
def test_an_error_that_the_model_goes_on_after_is_a_limit(model: Model, strict: bool) -> None:
    x = torch.randn(4, 4)
    try:
        with pytest.warns(UserWarning, match=r"is right only where b <= 8"):
            program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "b", 1: "n"},), strict=strict)
    except onnxplug.CaptureError as error:
        assert strict
        assert "context manager" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(program(x)[0], model(x))
    far = torch.randn(9, 4)
    assert program(far)[0].shape != model(far).shape or not torch.allclose(program(far)[0], model(far))


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_sizes_that_an_operator_refuses_and_the_model_treats_otherwise_are_reported(strict: bool) -> None:
    with pytest.warns(UserWarning, match=r"is right only where (b == n|n == b): .*test_checks\.py:\d+ branches"):
        onnxplug.to_onnx(
            refused_by_an_operator, (torch.randn(4, 4),), dynamic_shapes=({0: "b", 1: "n"},), strict=strict
        )
