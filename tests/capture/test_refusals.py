"""Checks of data that only refuse: the model without them, or an error; never another side of the branch.

PYTEST_DONT_REWRITE: the asserts of the models are Python's own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError
from tests.support.check import Call

Function = Callable[[torch.Tensor], torch.Tensor]


def is_bad(x: torch.Tensor) -> Any:
    return bool((x < 0).any())


def by_a_helper(x: torch.Tensor) -> torch.Tensor:
    if is_bad(x):
        raise ValueError("negative")
    return x.sqrt()


def by_any(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError(f"negative: {x.min().item()} among {', '.join(str(n) for n in range(3))} {x}")
    return x.sqrt()


def with_texts(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError(
            f"negative: {x} of {x.shape}, {x.shape[0]} rows, {x.shape[0] / 2}, the least {x.min().item()!s}"
        )
    return x.sqrt()


def by_all(x: torch.Tensor) -> torch.Tensor:
    if not (x >= 0).all():
        raise ValueError("negative")
    return x.sqrt()


def by_assert(x: torch.Tensor) -> torch.Tensor:
    assert x.min().item() >= 0, "negative"
    return x.sqrt()


def by_two_conditions(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 1 and (x < 0).any():
        raise ValueError("negative")
    return x.sqrt()


def raised_again(x: torch.Tensor) -> torch.Tensor:
    try:
        return by_any(x)
    except KeyError:
        return x


def in_every_step(x: torch.Tensor) -> torch.Tensor:
    for step in range(4):
        if not torch.isfinite(x).all():
            raise RuntimeError(f"step {step}")
        x = x.exp().log1p()
    return x


def of_torch(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gaussian_nll_loss(x, x * 2, x)


REFUSING: dict[str, Function] = {
    f.__name__: f
    for f in (
        by_any,
        with_texts,
        by_all,
        by_assert,
        by_a_helper,
        by_two_conditions,
        raised_again,
        in_every_step,
        of_torch,
    )
}


@pytest.mark.parametrize("name", REFUSING)
def test_a_check_that_only_refuses_is_left_out_with_a_warning(name: str) -> None:
    x = torch.rand(3, 4)
    with pytest.warns(UserWarning, match=r"the model raises at .*:\d+ for some values of its inputs \(\w+Error: "):
        program = onnxplug.to_onnx(Call(REFUSING[name]), (x,), dynamic_shapes=(({0: "n"},),))
    report = program.verify()
    assert len(report.cases) == 4
    assert not {"If", "Loop"} & {node.op_type for node in program.model.graph}


def test_a_check_in_every_layer() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.isnan(x).any():
                raise ValueError("NaN")
            return self.linear(x)

    with pytest.warns(UserWarning, match="the model raises") as caught:
        program = onnxplug.to_onnx(nn.Sequential(*(Layer() for _ in range(6))), (torch.rand(2, 4),), verify=True)
    assert {node.op_type for node in program.model.graph} <= {"Gemm", "MatMul", "Add"}
    assert len([w for w in caught if "the model raises" in str(w.message)]) == 1


# -- code that goes on, somehow ----------------------------------------------------------------------------------------


def handled(x: torch.Tensor) -> torch.Tensor:
    try:
        return by_any(x)
    except ValueError:
        return x * 100


def suppressed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ValueError):
        return by_any(x)
    return x * 100


class Asked:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def root(self) -> torch.Tensor:
        if (self.x < 0).any():
            raise AttributeError("negative")
        return self.x.sqrt()


def taken_for_absent(x: torch.Tensor) -> torch.Tensor:
    return Asked(x).root if hasattr(Asked(x), "root") else x * 100


def taken_for_the_end(x: torch.Tensor) -> torch.Tensor:
    def steps() -> Any:
        yield x
        if (x < 0).any():
            raise RuntimeError("negative")
        yield x * 100

    total = torch.zeros_like(x)
    with contextlib.suppress(RuntimeError):
        for step in steps():
            total = total + step
    return total


def depending_on_a_size(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        if x.shape[0] < 5:
            raise ValueError("negative")
        return x * 100
    return x.sqrt()


def depending_on_other_data(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        if (x < -1).all():
            raise ValueError("negative")
        return x * 100
    return x.sqrt()


def of_what_only_tracing_refuses(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        try:
            return torch.from_numpy(x.numpy() * 100)
        except Exception as error:
            raise ValueError("no array") from error
    return x.sqrt()


def of_what_tracing_refuses_silently(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        failed = False
        try:
            x = torch.from_numpy(x.numpy() * 100)
        except Exception:
            failed = True
        if failed:
            raise ValueError("no array")
        return x
    return x.sqrt()


def of_what_a_helper_hides(x: torch.Tensor) -> torch.Tensor:
    def array() -> Any:
        try:
            return x.numpy()
        except Exception:
            return None

    if (x < 0).any():
        if array() is None:
            raise ValueError("no array")
        return x * 100
    return x.sqrt()


def without_a_raise(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        return x.numpy(force=True).missing  # type: ignore[no-any-return]
    return x.sqrt()


def going_on(x: torch.Tensor) -> torch.Tensor:
    if x.ndim > 5:
        raise ValueError("axes")
    if (x < 0).any():
        return x * 100
    return x.sqrt()


GOING_ON: dict[str, Function] = {
    f.__name__: f
    for f in (
        *(handled, suppressed, taken_for_absent, taken_for_the_end, depending_on_a_size, depending_on_other_data),
        *(
            of_what_only_tracing_refuses,
            of_what_tracing_refuses_silently,
            of_what_a_helper_hides,
            without_a_raise,
            going_on,
        ),
    )
}


def assert_right_or_refused(function: Function, axes: Any = (({0: "n"},),)) -> bool:
    """Whether the model exports; an exported model has PyTorch's result wherever there is one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = onnxplug.to_onnx(Call(function), (torch.rand(3, 4),), dynamic_shapes=axes)
    except CaptureError:
        return False
    assert program.exported_program is not None
    ranges = list(program.exported_program.range_constraints.values())
    for rows, shift in itertools.product((1, 2, 3, 7), (0.0, -0.5, -3.0)):
        if any(not limits.lower <= rows <= limits.upper for limits in ranges):  # sizes outside the stated range
            continue
        x = torch.rand(rows, 4, generator=torch.Generator().manual_seed(rows)) + shift
        try:
            expected = function(x)
        except Exception:  # eager has no result
            continue
        torch.testing.assert_close(program(x)[0], expected, equal_nan=True)
    return True


def handling_torchs_error(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.flip(0) if (x > 0).all() else x
    except RuntimeError:
        return x * 100


def handling_the_error_of_an_array(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.from_numpy(x.numpy() + 1)
    except RuntimeError:
        return x * 100


def handling_many_errors(x: torch.Tensor) -> torch.Tensor:
    for make in (x.tolist, x.data_ptr, x.__array__):
        try:
            make()
        except RuntimeError:
            x = x * 100
    return x + 1


@pytest.mark.parametrize("function", [handling_torchs_error, handling_many_errors])
def test_an_error_of_tracing_is_no_error_of_the_model(function: Function) -> None:
    assert not assert_right_or_refused(function)


def test_an_array_is_refused_or_right() -> None:
    assert_right_or_refused(handling_the_error_of_an_array)
    with pytest.raises(CaptureError, match=r"handles an error at .*test_refusals.py:\d+ that PyTorch does not raise"):
        onnxplug.to_onnx(Call(handling_the_error_of_an_array), (torch.rand(3, 4),), strict=False)


def handling_its_own_error(x: torch.Tensor) -> torch.Tensor:
    try:
        return x @ x
    except RuntimeError:
        return x + 1


@pytest.mark.filterwarnings("ignore")
def test_an_error_that_pytorch_raises_too_is_handled_as_there() -> None:
    program = onnxplug.to_onnx(Call(handling_its_own_error), (torch.rand(3, 4),), verify=True)
    assert [node.op_type for node in program.model.graph] == ["Add"]


@pytest.mark.parametrize("name", GOING_ON)
def test_code_that_goes_on_is_not_left_out(name: str) -> None:
    assert not assert_right_or_refused(GOING_ON[name])


# -- generated checks --------------------------------------------------------------------------------------------------

CONDITIONS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: (x < 0).any(),
    lambda x: not (x >= 0).all(),
    lambda x: x.min().item() < 0,
    lambda x: (x < -1).any(),
    lambda x: x.shape[0] > 4 and (x < 0).any(),
    lambda x: (x < 0).any() and x.shape[0] > 4,
    lambda x: bool((x < 0).sum() > 2),
    lambda x: torch.isnan(x).any() or (x < 0).all(),
)


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("refused")


def refuse_few(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 5:
        raise ValueError("few")
    return x - 50


def refuse_some(x: torch.Tensor) -> torch.Tensor:
    if (x < -2).any():
        raise ValueError("some")
    return x - 50


SIDES: tuple[Function, ...] = (refuse, refuse, refuse_few, refuse_some, lambda x: x * 100)


def generated(seed: int) -> Function:
    """A model of up to three checks, each with a side that may refuse, in a frame that may handle it."""
    choose = random.Random(seed)
    steps = [
        (choose.choice(CONDITIONS), choose.choice(SIDES), choose.random() < 0.2, choose.random() < 0.2)
        for _ in range(choose.randint(1, 3))
    ]

    def model(x: torch.Tensor) -> torch.Tensor:
        def check(condition: Any, side: Function, on_the_other: bool) -> torch.Tensor:
            if bool(condition(x)) != on_the_other:
                return side(x)
            if x.ndim > 9:
                raise ValueError("axes")
            return x + 1

        for condition, side, on_the_other, handles in steps:
            if handles:
                try:
                    x = check(condition, side, on_the_other)
                except ValueError:
                    x = x - 7
            else:
                x = check(condition, side, on_the_other)
        return x

    return model


def test_generated_checks_are_right_or_refused() -> None:
    assert {assert_right_or_refused(generated(seed)) for seed in range(12)} == {True, False}


@pytest.mark.long
def test_many_generated_checks_are_right_or_refused() -> None:
    assert {assert_right_or_refused(generated(seed)) for seed in range(12, 300)} == {True, False}


# -- sides that raise only while the model is traced, or that leave something behind -------------------------------------

_LEFT: dict[str, Any] = {}


@torch.library.custom_op("onnxplug_refusals::hundred", mutates_args=())
def hundred(x: torch.Tensor) -> torch.Tensor:
    return x * 100


@hundred.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no shape")


def by_the_type_of_a_number(x: torch.Tensor) -> torch.Tensor:
    smallest = x.min().item()
    if smallest < 0:
        if not isinstance(smallest, float):
            raise TypeError("no number")
        return x * 100
    return x


def by_the_type_of_a_tensor(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        if type(x) is not torch.Tensor:
            raise TypeError("no tensor")
        return x * 100
    return x


def by_a_flag_of_the_capture(x: torch.Tensor) -> torch.Tensor:
    is_captured = torch.compiler.is_compiling()
    if (x < 0).any():
        if is_captured:
            raise RuntimeError("not now")
        return x * 100
    return x


def by_a_kernel_for_shapes(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        return torch.ops.onnxplug_refusals.hundred(x)  # type: ignore[no-any-return]
    return x


def by_an_error_without_its_traceback(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        try:
            return torch.from_numpy(x.numpy() * 100)
        except Exception as error:
            raise error.with_traceback(None)  # noqa: B904
    return x


def by_what_a_handler_decides(x: torch.Tensor) -> torch.Tensor:
    try:
        if (x < 0).any():
            raise ValueError("negative")
    except ValueError:
        if torch.compiler.is_compiling():
            raise
        return x * 100
    return x


class _Manager:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> bool:
        return not torch.compiler.is_compiling()


def by_what_a_manager_decides(x: torch.Tensor) -> torch.Tensor:
    with _Manager():
        if (x < 0).any():
            raise ValueError("negative")
        return x
    return x * 100


ONLY_TRACED = (
    *(by_the_type_of_a_number, by_the_type_of_a_tensor, by_a_flag_of_the_capture, by_a_kernel_for_shapes),
    *(by_an_error_without_its_traceback, by_what_a_handler_decides, by_what_a_manager_decides),
)


@pytest.mark.parametrize("function", ONLY_TRACED)
def test_a_side_that_raises_only_while_it_is_traced_is_no_refusal(function: Function) -> None:
    assert not assert_right_or_refused(function)


class _Recorded(ValueError):
    def __init__(self) -> None:
        super().__init__("negative")
        _LEFT["bad"] = True


def with_an_effect_of_the_error(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise _Recorded
    return x * 100 if _LEFT.get("bad") else x


def with_an_unfinished_change(x: torch.Tensor) -> torch.Tensor:
    _LEFT["depth"] = _LEFT.get("depth", 0) + 1
    if (x < 0).any():
        raise ValueError("negative")
    _LEFT["depth"] -= 1
    return x * 100 if _LEFT["depth"] else x


@functools.lru_cache
def _left() -> dict[str, bool]:
    return {}


def with_an_effect_in_a_cache(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        _left()["bad"] = True
        raise ValueError("negative")
    return x * 100 if _left() else x


def with_another_order_of_questions(x: torch.Tensor) -> torch.Tensor:
    _LEFT["calls"] = _LEFT.get("calls", 0) + 1
    if _LEFT["calls"] % 2:
        if (x < 0).any():
            raise ValueError("negative")
        return x + 1
    if (x > 0.5).any():
        return x * 100
    return x + 1


@pytest.mark.parametrize(
    "function",
    [
        *(with_an_effect_of_the_error, with_an_unfinished_change, with_an_effect_in_a_cache),
        with_another_order_of_questions,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_side_that_refuses_leaves_nothing_in_a_module_of_python(function: Function) -> None:
    _LEFT.clear()
    program = onnxplug.to_onnx(Call(function), (torch.rand(3, 4),), dynamic_shapes=(({0: "n"},),))
    for rows in (3, 2):
        _LEFT.clear(), _left.cache_clear()
        x = torch.rand(rows, 4)
        torch.testing.assert_close(program(x)[0], function(x))


@pytest.mark.filterwarnings("ignore")
def test_a_side_that_ends_the_process_is_a_refusal() -> None:
    def ending(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise SystemExit(3)
        return x + 1

    program = onnxplug.to_onnx(Call(ending), (torch.rand(3, 4),), dynamic_shapes=(({0: "n"},),))
    x = torch.rand(2, 4)
    torch.testing.assert_close(program(x)[0], x + 1)
