"""Operators that refuse values, in models that handle the error: right for these values, refused, or with a warning.

PYTEST_DONT_REWRITE: the handlers of the models are Python's own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import onnxplug
from onnxplug import CaptureError
from onnxplug.patches.refusing import may_refuse
from tests.support.check import Call
from tests.support.tolerances import looser

Step = Callable[[torch.Tensor], torch.Tensor]

SAID = "handles errors of"
#: A value that every operator below takes, and values that operators refuse.
FINE = torch.tensor([[2.0, 0.5, 0.0], [0.5, 2.0, 0.5], [0.0, 0.5, 1.0]])
REFUSED = {
    "not definite": -FINE,
    "singular": torch.zeros(3, 3),
    "large": FINE * 1000,
    "NaN": FINE * float("nan"),
    "infinite": FINE * float("inf"),
}


@torch.library.custom_op("handled::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """A custom operator that refuses values."""
    if not bool((x >= 0).all()):
        raise KeyError("negative")
    return x.sqrt()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


RULES = [onnxplug.Rule("handled::positive", lambda g, node: g.op.Sqrt(node.args[0]))]


def indices(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(7.0, 7.0, -7.0).abs().clamp(max=9).to(torch.int64)


#: Operators that refuse some values.
OPERATORS: dict[str, Step] = {
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, torch.ones(3, 3)),
    "eigenvalues": torch.linalg.eigvalsh,
    "embedding": lambda x: nn.functional.embedding(indices(x), torch.arange(12.0).reshape(4, 3)).sum(-1),
    "gather": lambda x: x.gather(1, indices(x)),
    "index": lambda x: torch.arange(3.0)[indices(x)],
    "take": lambda x: torch.take(x, indices(x) * 3),
    "scatter": lambda x: torch.zeros(3, 3).scatter(1, indices(x), 1.0),
    "one_hot": lambda x: nn.functional.one_hot(indices(x), 3).float().sum(-1),
    "division": lambda x: (12 // (2 - indices(x.clamp(max=1.0)) - (x == 0).all().long() * 2)).float() + x,
    "remainder": lambda x: (12 % (2 - (x == 0).all().long() * 2)).float() + x,
    "binary_cross_entropy": lambda x: nn.functional.binary_cross_entropy(x / 4, x / 4) + x,
    "nll_loss": lambda x: nn.functional.nll_loss(x, indices(x[0])) + x,
    "of a library": lambda x: torch.ops.handled.positive(x),
    "number": lambda x: x * (1 / x.sum().item()),
}
#: Operators of which other overloads, or calls without some operand, take all values.
OF_SOME_OVERLOADS: dict[str, Step] = {
    "masked_fill": lambda x: torch.zeros(3, 3, dtype=torch.float16).masked_fill(x > 1, x.sum()).float() + x,
    "masked_fill_": lambda x: torch.zeros(3, 3, dtype=torch.float16).masked_fill_(x > 1, x.sum()).float() + x,
    "linspace": lambda x: torch.linspace(x.sum(), 1, 3, dtype=torch.float16).float() + x,
    "narrow": lambda x: torch.narrow(x, 1, indices(x.sum()) // 9, 2).sum(1, keepdim=True) + x,
    "randint_like": lambda x: torch.randint_like(x, indices(x.sum())) * 0 + x,
    "searchsorted": lambda x: torch.searchsorted(x[0].contiguous(), x, sorter=indices(x[0])) + x,
    "cov": lambda x: torch.cov(x, aweights=x[1]) + x,
}


def by_class(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            return step(x)
        except (RuntimeError, IndexError, KeyError, ArithmeticError):
            return x * 100

    return model


def by_any(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            y = step(x)
        except:  # noqa: E722
            y = x * 100
        else:
            y = y + 1
        return y

    return model


def in_the_end(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 100
        try:
            y = step(x)
        finally:
            return y  # noqa: B012

    return model


def in_a_helper(step: Step) -> Step:
    def helper(x: torch.Tensor) -> torch.Tensor | None:
        try:
            return step(x)
        except Exception as error:
            if "memory" in str(error):
                raise
            return None

    def model(x: torch.Tensor) -> torch.Tensor:
        y = helper(x)
        return x * 100 if y is None else y

    return model


def suppressed(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(Exception):
            x = step(x)
        return x + 1

    return model


class Swallows:
    """A context manager that takes every error."""

    def __enter__(self) -> None: ...

    def __exit__(self, *about: object) -> bool:
        return True


@contextlib.contextmanager
def swallowing() -> Iterator[None]:
    with contextlib.suppress(Exception):
        yield


def in_a_manager(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), Swallows():
            x = step(x)
        return x + 1

    return model


def in_a_generator(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        with swallowing():
            x = step(x)
        return x + 1

    return model


def in_a_loop(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            try:
                x = step(x)
                break
            except Exception:
                x = x.nan_to_num(0.5, 0.5, 0.5).abs().clamp(max=1) + torch.eye(3) * 2
        else:
            x = x * 100
        return x

    return model


def nested(step: Step) -> Step:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            try:
                y = step(x)
            except StopIteration:
                y = x
        except Exception as error:
            raise_later = isinstance(error, MemoryError)
            if raise_later:
                raise
            y = x * 100
        return y

    return model


def by_iteration(step: Step) -> Step:
    class Rows:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __getitem__(self, i: int) -> torch.Tensor:
            if i > 1:
                raise IndexError
            return step(self.x) * i

    def model(x: torch.Tensor) -> torch.Tensor:
        for row in Rows(x):
            x = x + row
        return x

    return model


def in_a_module(step: Step) -> Step:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return step(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(Block(), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.block(x)
            except Exception:
                return x * 100

    return Model()


HANDLERS: dict[str, Callable[[Step], Step]] = {
    f.__name__: f
    for f in (
        *(by_class, by_any, in_the_end, in_a_helper, suppressed, in_a_manager, in_a_generator, in_a_loop, nested),
        *(by_iteration, in_a_module),
    )
}


def export(model: Any, x: torch.Tensor = FINE, **options: Any) -> tuple[Any, bool]:
    """The program, and whether the export says that the model handles errors; ``None`` where it is refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = model if isinstance(model, nn.Module) else Call(model)
            program = onnxplug.to_onnx(model, (x,), rules=RULES, **options)
        except CaptureError:
            return None, False
    return program, any(SAID in str(w.message) for w in caught)


def silently_wrong(model: Any, **options: Any) -> list[str]:
    """The names of the values for which an export without a warning has other numbers than PyTorch."""
    program, messages = export(model, **options)
    if program is None or messages:
        return []
    wrong = []
    for name, x in {"fine": FINE, **REFUSED}.items():
        try:
            expected = model(x.clone())
        except Exception:
            continue
        try:
            torch.testing.assert_close(program(x)[0], expected, equal_nan=True, **looser("core"))
        except Exception as error:
            wrong.append(f"{name}: {str(error)[:60]!r}")
    return wrong


def test_a_function_that_tensors_have_as_a_method_handles_nothing() -> None:
    def trace(x: torch.Tensor) -> torch.Tensor:  # as Tensor.trace, which is a descriptor in C
        return torch.nn.functional.unfold(x, (2, 3))

    dynamic = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    program = onnxplug.to_onnx(Call(trace), (torch.zeros(0, 3, 9, 7),), dynamic_shapes=((dynamic,),))
    x = torch.randn(2, 3, 7, 8)
    torch.testing.assert_close(program(x)[0], trace(x))


PAIRS = [(h, o) for n, h in enumerate(HANDLERS) for m, o in enumerate(OPERATORS) if (n + m) % 8 == 0]


@pytest.mark.parametrize(("handler", "operator"), PAIRS)
def test_no_handler_of_refused_values_is_silent(handler: str, operator: str) -> None:
    assert not silently_wrong(HANDLERS[handler](OPERATORS[operator]))


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_no_handler_is_silent(strict: bool) -> None:
    wrong = {
        (handler, operator): wrong
        for handler, operator in itertools.product(HANDLERS, OPERATORS)
        if (wrong := silently_wrong(HANDLERS[handler](OPERATORS[operator]), strict=strict))
    }
    assert not wrong


@pytest.mark.parametrize("strict", [False, True])
def test_the_warning_has_the_lines_of_call_and_handler(strict: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x

    line = model.__code__.co_firstlineno
    text = rf"errors of aten.linalg_cholesky\w* at .*test_handled.py:{line + 2} \(the handler: .*test_handled.py:{line + 3}\)"
    with pytest.warns(UserWarning, match=text):
        onnxplug.to_onnx(Call(model), (FINE,), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("operator", ["cholesky", "gather", "division"])
def test_an_example_that_is_refused_is_refused(operator: str, strict: bool) -> None:
    x = torch.zeros(3, 3) if operator == "division" else -FINE - 4
    with pytest.raises(CaptureError, match=r"test_handled.py:\d+ that PyTorch raises for the example inputs"):
        onnxplug.to_onnx(Call(by_any(OPERATORS[operator])), (x,), strict=strict)


def test_an_error_that_is_not_of_values() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(3, 1).expand(3, 3)
        try:
            y.add_(x)
        except RuntimeError:  # the elements are one in memory
            y = y + x * 2
        return y

    with pytest.raises(CaptureError, match="refers to a single memory location"):
        onnxplug.to_onnx(Call(model), (FINE,))


# -- numbers and sizes that depend on data -------------------------------------------------------------------------------


def divided(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().item()
    try:
        y = 1 / n
    except ZeroDivisionError:
        return x * 100
    return x + y


def rooted(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().item()
    try:
        y = math.sqrt(n)
    except ValueError:
        return x * 100
    return x + y


def checked(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().to(torch.int64).item()
    try:
        torch._check(n > 3)
    except RuntimeError:
        return x * 100
    return x + n


def selected(x: torch.Tensor) -> torch.Tensor:
    n = x[0, 0].to(torch.int64).item()
    try:
        return x[n]
    except IndexError:
        return x[0] * 100


def over_a_branch(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.cond(x.sum() > 0, torch.linalg.cholesky, lambda x: x * 2, (x,))
    except RuntimeError:
        return x * 100


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("model", [divided, rooted, checked, selected, over_a_branch])
def test_numbers(model: Step, strict: bool) -> None:
    program, messages = export(model, strict=strict)
    assert program is None or messages


# -- handlers that let the error pass ------------------------------------------------------------------------------------


def of_another_class(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.linalg.inv(x)
    except (KeyError, torch.OutOfMemoryError, AttributeError):
        return x * 100


def raised_as_another(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.linalg.inv(x)
    except RuntimeError as error:
        raise ValueError("singular") from error


def raised_again(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.linalg.inv(x)
    except:
        x = x * 2
        raise
    finally:
        x = x + 1


def suppressed_others(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(KeyError, StopIteration):
        x = torch.linalg.inv(x)
    return x


@contextlib.contextmanager
def letting_pass() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        print(error)


def under_managers(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False), letting_pass():
        return torch.linalg.inv(x)


class Inverse:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def whole(self) -> torch.Tensor:
        return torch.linalg.inv(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.linalg.inv(self.x)[i]


def of_a_property(x: torch.Tensor) -> torch.Tensor:
    return Inverse(x).whole + Inverse(x)[0]


def beside_a_handler(x: torch.Tensor) -> torch.Tensor:
    try:
        scale = {}["scale"]
    except Exception:
        x = torch.linalg.inv(x)
        scale = 2.0
    else:
        x = torch.linalg.pinv(x)
    return torch.linalg.inv(x) * scale


def without_refusals(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.softmax(x @ x + 1, -1).sum(0).reshape(1, 3)[:, :2] // 2
    except Exception:
        return x


PASSING: tuple[Any, ...] = (
    *(of_another_class, raised_as_another, raised_again, suppressed_others, under_managers, of_a_property),
    beside_a_handler,
    pytest.param(
        without_refusals,
        marks=pytest.mark.skipif(
            not hasattr(torch.Tag, "reduction"), reason="torch 2.9 has no tag of reductions: they count as refusing"
        ),
    ),
)


@pytest.mark.parametrize("model", PASSING)
def test_handlers_that_let_errors_pass_give_no_warning(model: Step) -> None:
    program, messages = export(model)
    assert program is not None
    assert not messages
    torch.testing.assert_close(program(FINE)[0], model(FINE.clone()))


def test_an_error_that_was_replaced_is_another_error() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            return raised_as_another(x)
        except ValueError:
            return x * 100

    assert export(model)[1]


@pytest.mark.parametrize("operator", OF_SOME_OVERLOADS)
def test_overloads_that_refuse_values_are_not_silent(operator: str) -> None:
    program, messages = export(by_class(OF_SOME_OVERLOADS[operator]))
    assert program is None or messages


@pytest.mark.parametrize("value", [-1.0, 7])
def test_overloads_that_take_numbers_take_all_values(value: float) -> None:
    program, messages = export(by_class(lambda x: x.masked_fill(x > 1, value).narrow(1, 0, 2)))
    assert program is not None
    assert not messages


# -- operators that are taken to refuse nothing --------------------------------------------------------------------------

_FLOATS = (math.nan, math.inf, -3.0, 1e30, 0.0)
_INTEGERS = (-7, 0, 2**63 - 1, 1000, 1)


class _Tried(TorchDispatchMode):
    """Calls each operator that is listed as taking all values with values that other operators refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.tried: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (tuple(args), kwargs or {})
        if func.namespace == "aten" and not may_refuse(func, *call):
            self.tried.add(str(func))
            for n in range(5):
                values, named = tree_map_only(torch.Tensor, lambda t, n=n: _filled(t, n), call)
                try:
                    func(*values, **named)
                except (RuntimeError, IndexError, ValueError) as error:
                    self.refused.add(f"{func}: {error}")
        return func(*args, **kwargs or {})


def _filled(tensor: torch.Tensor, n: int) -> torch.Tensor:
    # A memory of the same size: as_strided reads beside the elements of its operand.
    memory, dtype = tensor.untyped_storage().clone(), tensor.dtype
    filled = torch.empty(0, dtype=dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    if dtype.is_floating_point or dtype.is_complex:
        return filled.copy_(torch.tensor(_FLOATS[n]))  # 1e30 is infinite in half precision
    if dtype is torch.bool:
        return filled.fill_(n % 2)
    limits = torch.iinfo(dtype)
    return filled.fill_(min(max(_INTEGERS[n], limits.min), limits.max))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8])
def test_operators_that_take_all_values_take_them(dtype: torch.dtype) -> None:
    tried = _Tried()
    for op in (op for op in op_db if dtype in op.dtypes and "sparse" not in op.name):
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), 8):
            with contextlib.suppress(Exception), tried:
                op(sample.input, *sample.args, **sample.kwargs)
    assert len(tried.tried) > 200
    assert not tried.refused
