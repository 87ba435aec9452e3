"""Gradients of gradients, and graphs kept for a second backward pass."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from onnxplug_compile.second_order import SecondDerivativeError
from torch import nn

from tests.support.compiled import compare

BY_EAGER = "the derivative of a graph's gradient is computed by eager PyTorch"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Penalty(nn.Module):
    """A critic's gradient penalty: the loss holds the gradient of a score by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        score = self.critic(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (gradient.norm(dim=1) - 1).square().mean()


class Adapted(nn.Module):
    """One step of gradient descent, and the result of the model after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.linear(x) - x.sum(1, keepdim=True)).square().mean()
        weight, bias = torch.autograd.grad(loss, list(self.linear.parameters()), create_graph=True)
        return nn.functional.linear(x, self.linear.weight - 0.1 * weight, self.linear.bias - 0.1 * bias).square()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("make", [Penalty, Adapted])
@pytest.mark.long
def test_models_that_differentiate_in_forward(make: Callable[[], nn.Module], traced: bool) -> None:
    """Dynamo breaks the graph at the gradient, which the loss differentiates; or it captures all of forward."""
    eager = make()
    mine = copy.deepcopy(eager)
    compiled = torch.compile(mine, backend="onnxplug", options={"fallback": not traced})
    messages: list[str] = []
    with torch._dynamo.config.patch(trace_autograd_ops=traced):
        for rows in (3, 5, 3):
            x = torch.randn(rows, 4)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = compiled(x).sum()
                got.backward()
            messages += [str(w.message) for w in caught if BY_EAGER in str(w.message)]
            expected = eager(x).sum()
            expected.backward()
            torch.testing.assert_close(got, expected)
            for one, other in zip(mine.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
        # torch 2.15 leaves a function that makes a leaf require gradients to eager whole.
        graphs = torch._dynamo.explain(make())(torch.randn(3, 4)).graph_count
    # One warning for each graph: the sizes of the second call made a second graph.
    assert len(messages) == (2 if graphs and not traced else 0)


def test_derivatives_of_every_order() -> None:
    compiled = torch.compile(lambda x, y: (x**4 * y).sum(), backend="onnxplug")
    x = torch.randn(3, requires_grad=True)
    y = x * 2  # an input that is computed from another: derivatives are partial
    first = torch.autograd.grad(compiled(x, y), [x, y], create_graph=True)
    with pytest.warns(UserWarning, match=BY_EAGER):
        second = torch.autograd.grad(first[0].sum(), x, create_graph=True)
    third = torch.autograd.grad(second[0].sum(), x)
    a = x.detach().clone().requires_grad_()
    b = a * 2
    wanted = torch.autograd.grad((a**4 * b).sum(), [a, b], create_graph=True)
    wanted_second = torch.autograd.grad(wanted[0].sum(), a, create_graph=True)
    compare([*first, *second], [*wanted, *wanted_second])
    compare(list(third), list(torch.autograd.grad(wanted_second[0].sum(), a)))


def test_the_gradient_itself_comes_from_the_graph() -> None:
    store: dict[str, Any] = {}
    compiled = torch.compile(lambda x: x.exp().sum(), backend="onnxplug", options={"fallback": False, "store": store})
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (gradient,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    compare(gradient.detach(), x.detach().exp())
    assert gradient.requires_grad
    assert [(graph.kind, len(graph.calls)) for graph in store["graphs"]] == [("forward", 1), ("backward", 1)]


def batch_norm() -> Callable[[torch.Tensor], torch.Tensor]:
    return nn.BatchNorm1d(4).train()


def dropout() -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.dropout(x, 0.5).square()


def two_views() -> Callable[[torch.Tensor], Any]:
    return lambda x: ((y := x.exp()), y[1:])


REFUSED: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any], str]] = {
    "random": (dropout, {}, "it has random operators"),
    "writes": (batch_norm, {}, "it writes to its inputs or buffers"),
    "shared memory": (two_views, {}, "some of its outputs share memory"),
    "no fallback": (lambda: torch.exp, {"fallback": False}, "'fallback': False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_second_derivatives_that_are_refused(name: str) -> None:
    """Eager, run again, would draw other numbers, write twice, or not know which output is which."""
    make, options, reason = REFUSED[name]
    compiled = torch.compile(make(), backend="onnxplug", options=options)
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        result = compiled(x)
        result = result[0] if isinstance(result, tuple) else result
        (gradient,) = torch.autograd.grad((result**2).sum(), x, create_graph=True)
        with pytest.raises(SecondDerivativeError, match=reason) as caught:
            torch.autograd.grad(gradient.sum(), x)
        assert "trace_autograd_ops" in str(caught.value.hint)


def test_under_autocast_and_after_a_write() -> None:
    compiled = torch.compile(lambda x, w: (x @ w).exp(), backend="onnxplug")
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compiled(x, w)
    (gradient,) = torch.autograd.grad(result.float().sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="autocast"):
        gradient.sum().backward()
    result = compiled(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match=r"written to|modified by an inplace operation"):
        torch.autograd.grad(torch.autograd.grad(result.sum(), x, create_graph=True)[0].sum(), x)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_kept_for_another_backward_pass(dynamic: bool | None) -> None:
    """AOTAutograd forbids it where it lets the backend overwrite tensors saved for backward."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="onnxplug", dynamic=dynamic, options={"fallback": False})
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        compiled(x).sum().backward()  # compiles the backward graph for one pass
        eager(x).sum().backward()
        for run in (compiled, eager):
            loss = run(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_inputs_are_let_go_with_the_backward_pass() -> None:
    """A loss that is kept for the record keeps no batch."""
    compiled = torch.compile(lambda x, w: (x * w).sum(), backend="onnxplug")
    w = torch.ones(3, requires_grad=True)
    compiled(torch.ones(3), w)

    x = torch.randn(3)
    gone = weakref.ref(x)
    loss = compiled(x, w)
    loss.backward()
    del x
    assert gone() is None
    assert loss.item() == loss.item()
