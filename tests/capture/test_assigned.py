"""Buffers that the model's code assigns: their new values are outputs, as those of buffers that it writes. Other tensors: a warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.releases import not_with

X = torch.randn(4, 3)
OTHERS = [torch.randn(1, 3), -torch.rand(7, 3)]
Function = Callable[["Inner", torch.Tensor], Any]


class Inner(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("a", torch.arange(3.0))
        self.register_buffer("b", torch.arange(3.0) + 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class Outer(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def mean(m: Inner, x: torch.Tensor) -> Any:
    m.a = m.a * 0.9 + x.mean(0)
    return x + m.a


def exchanged(m: Inner, x: torch.Tensor) -> Any:
    m.a, m.b = m.b, m.a
    return x + m.a


def old_one_is_returned(m: Inner, x: torch.Tensor) -> Any:
    old = m.a
    m.a = m.a + x[0]
    return old, old[1:], m.a


def view_of_the_old_one(m: Inner, x: torch.Tensor) -> Any:
    old = m.a
    m.a, m.b = m.b + 1, old.view(-1)
    return x * m.b


def written_after(m: Inner, x: torch.Tensor) -> Any:
    m.a = x[0] * 2
    m.a.add_(m.b)
    m.b.mul_(2)
    return x - m.a


def registered_anew(m: Inner, x: torch.Tensor) -> Any:
    m.register_buffer("a", m.a * 2)
    return x * m.a


def grown(m: Inner, x: torch.Tensor) -> Any:
    m.a = torch.cat([m.a, x[0]])
    return x + m.a.sum()


def put_back(m: Inner, x: torch.Tensor) -> Any:
    old, m.a = m.a, m.a * 2
    y = x * m.a
    m.a = old
    return y


def called_again(m: Inner, x: torch.Tensor) -> Any:
    m.a = m.a * 0.5 + x.mean(0)
    m.turn = not getattr(m, "turn", False)
    y = m(x + m.a) if m.turn else x * m.a
    m.turn = False
    return y


FUNCTIONS = [
    mean,
    exchanged,
    old_one_is_returned,
    view_of_the_old_one,
    written_after,
    registered_anew,
    grown,
    put_back,
    called_again,
]


def compare(model: nn.Module, **options: Any) -> None:
    before = copy.deepcopy(model)
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes={"x": {0: torch.export.Dim("n")}}, **options)
    names = [output.name for output in program.model.graph.outputs]
    for (name, tensor), (_, old) in zip(model.named_buffers(), before.named_buffers(), strict=True):
        assert torch.equal(tensor, old), name
    for x in (X, *OTHERS):
        eager = copy.deepcopy(before)
        wanted = eager(x)
        wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
        results = program(x)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        torch.testing.assert_close(results[: len(wanted)], wanted)
        state = dict(zip(names[len(wanted) :], results[len(wanted) :], strict=True))
        olds = dict(before.named_buffers())
        changed = {f"{k}_out": v for k, v in eager.named_buffers() if not torch.equal(v, olds[k])}
        torch.testing.assert_close(state, changed)
    assert program.verify().cases


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [Inner, Outer], ids=["outermost", "inner"])
def test_written(kind: Callable[[Function], nn.Module], function: Function, seeded: None) -> None:
    compare(kind(function))


@pytest.mark.parametrize("function", [mean, exchanged, old_one_is_returned, registered_anew], ids=lambda f: f.__name__)
def test_written_in_the_strict_mode(function: Function, seeded: None) -> None:
    compare(Outer(function), strict=True)


def texts_of(model: nn.Module, strict: bool) -> list[str]:
    """The warnings of an export, whose results are compared with the model's next call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, (X,), dynamic_shapes=({0: torch.export.Dim("n")},), strict=strict)
    for x in (X, *OTHERS):
        torch.testing.assert_close(program(x)[0], copy.deepcopy(model)(x))
    return [str(warning.message) for warning in caught]


def widened(m: Inner, x: torch.Tensor) -> Any:
    m.a = m.a.double()
    return x + m.a.float()


def removed(m: Inner, x: torch.Tensor) -> Any:
    m.a = None
    return x + 1


@pytest.mark.parametrize(
    "strict",
    [
        pytest.param(False, id=""),
        pytest.param(True, id="strict", marks=not_with("2.9", "refuses such an assignment in the strict mode")),
    ],
)
@pytest.mark.parametrize("function", [widened, removed], ids=lambda f: f.__name__)
def test_what_is_no_value_of_the_buffer_is_said(function: Function, strict: bool) -> None:
    (text,) = texts_of(Outer(function), strict)
    assert "assigns to the buffer 'inner.a'" in text


@pytest.mark.parametrize("size", [lambda x: x.mean(), lambda x: x * 2], ids=["no axes", "dynamic"])
def test_another_shape_is_said_in_the_strict_mode(size: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def assigned(m: Inner, x: torch.Tensor) -> Any:
        m.a = size(x)
        return x + m.a

    (text,) = texts_of(Outer(assigned), True)
    assert "assigns to the buffer 'inner.a'" in text


class Plain(nn.Module):
    def __init__(self, function: Callable[[Plain, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.state = torch.arange(3.0)
        self.states: Any = [torch.ones(3), {"h": torch.ones(3)}]
        self.pair = (torch.ones(3), torch.zeros(3))
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def decayed(m: Plain, x: torch.Tensor) -> Any:
    m.state = m.state * 0.5 + x.mean(0)
    return x + m.state


def in_a_list(m: Plain, x: torch.Tensor) -> Any:
    m.states[0] = m.states[0] + x.mean(0)
    return x + m.states[0]


def in_a_dict(m: Plain, x: torch.Tensor) -> Any:
    y = x * m.states[1]["h"]
    m.states[1]["h"] = x.mean(0)
    return y


def in_a_tuple(m: Plain, x: torch.Tensor) -> Any:
    m.pair = (m.pair[0] * 2, m.pair[1])
    return x * m.pair[0]


def longer(m: Plain, x: torch.Tensor) -> Any:
    m.state = torch.cat([m.state, x[0]])
    return x + m.state.sum()


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (decayed, "state"),
        (in_a_list, "states[0]"),
        (in_a_dict, "states[1]['h']"),
        (in_a_tuple, "pair[0]"),
        (longer, "state"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_a_replaced_tensor_that_is_no_buffer_is_said(function: Any, name: str, strict: bool, seeded: None) -> None:
    (text,) = texts_of(nn.Sequential(Plain(function)), strict)
    assert f"'0.{name}'" in text or f'"0.{name}"' in text
    assert __file__ in text


def test_a_replaced_parameter_is_said() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            self.layer.weight = nn.Parameter(self.layer.weight * 0.5)
            return self.layer(x)

    (text,) = texts_of(nn.Sequential(Halved()), False)
    assert "'0.layer.weight'" in text


def only_shown(m: Plain, x: torch.Tensor) -> Any:
    m.state = m.state * 0.9 + x.mean(0)
    return x + 1


def overwritten(m: Plain, x: torch.Tensor) -> Any:
    m.last, m.state = x, x * 2
    return m.state + 1


def made_once(m: Plain, x: torch.Tensor) -> Any:
    if m.last is None:
        m.last = torch.arange(3.0)
    return x + m.last


def moved(m: Plain, x: torch.Tensor) -> Any:
    m.state = m.state.to(x.device, x.dtype)
    return x + m.state


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("function", [only_shown, overwritten, made_once, moved], ids=lambda f: f.__name__)
def test_by_products_are_not_said(function: Any, strict: bool) -> None:
    assert texts_of(nn.Sequential(Plain(function)), strict) == []
