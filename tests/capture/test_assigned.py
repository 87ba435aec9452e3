"""Buffers that the model's code assigns: their new values are outputs, as those of buffers that it writes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

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


FUNCTIONS = [
    mean,
    exchanged,
    old_one_is_returned,
    view_of_the_old_one,
    written_after,
    registered_anew,
    grown,
    put_back,
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


def test_another_dtype_is_said() -> None:
    def widened(m: Inner, x: torch.Tensor) -> Any:
        m.a = m.a.double()
        return x + m.a

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(Outer(widened), (X,))
    assert any("assigns to the buffer 'inner.a'" in str(warning.message) for warning in caught)
    torch.testing.assert_close(program(X)[0], Outer(widened)(X))
