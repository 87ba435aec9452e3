"""Training by torch.compile: fifty steps with eager's losses, in mixed precision too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.sampling import rotated
from tests.support.tolerances import looser
from tests.support.training import MODELS, Data

STEPS = 50


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):  # Dynamo else leaves recurrent layers to eager
        yield
    torch._dynamo.reset()


def losses(
    run: Callable[..., torch.Tensor], model: nn.Module, data: Data, steps: int = STEPS, eps: float = 1e-8
) -> torch.Tensor:
    """The loss of each step of Adam. The batch's size changes from step to step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=eps)
    torch.manual_seed(5)
    results = []
    for step in range(steps):
        loss = run(*data(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return torch.tensor(results)


def made(name: str) -> tuple[nn.Module, nn.Module, Data]:
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    return model, copy.deepcopy(model), data


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "cnn" else pytest.mark.long) for n in MODELS])
def test_fifty_steps_have_the_losses_of_eager(name: str) -> None:
    mine, theirs, data = made(name)
    store: dict[str, Any] = {}
    compiled = torch.compile(mine, backend="onnxplug", options={"fallback": False, "store": store})
    expected, got = losses(theirs, theirs, data), losses(compiled, mine, data)
    torch.testing.assert_close(got, expected, **looser("training"))
    assert expected[-5:].mean() < 0.75 * expected[:5].mean()
    kinds = [graph.kind for graph in store["graphs"]]
    assert kinds == ["forward", "backward"] * 2, "one pair for the first size, one for all others"
    for one, other in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, **looser("training"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["cnn", pytest.param("transformer", marks=pytest.mark.long)])
def test_mixed_precision(name: str) -> None:
    """Products in bfloat16, everything else in float32, as autocast chooses for eager."""
    mine, theirs, data = made(name)
    store: dict[str, Any] = {}
    compiled = torch.compile(mine, backend="onnxplug", options={"fallback": False, "store": store})

    def cast(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(*args: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(*args)

        return step

    expected, got = losses(cast(theirs), theirs, data), losses(cast(compiled), mine, data)
    torch.testing.assert_close(got, expected, **looser("training, bfloat16"))
    forward = store["graphs"][0]
    types = {
        str(node.meta["val"].dtype)
        for node in forward.module.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    }
    assert {"torch.bfloat16", "torch.float32"} <= types
    assert {p.dtype for p in mine.parameters()} == {torch.float32}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_model_in_half_precision(dtype: torch.dtype) -> None:
    mine, theirs, data = made("cnn")
    mine, theirs = mine.to(dtype), theirs.to(dtype)
    compiled = torch.compile(mine, backend="onnxplug", options={"fallback": False})

    def halves(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = data(step)
        return inputs.to(dtype), targets

    eps = 1e-4  # 1e-8 is 0 in float16
    expected, got = losses(theirs, theirs, halves, 10, eps), losses(compiled, mine, halves, 10, eps)
    torch.testing.assert_close(got, expected, **looser("training, bfloat16"))


@pytest.mark.long
def test_gradients_accumulate_and_clip() -> None:
    """The steps between backward and the optimizer's step stay PyTorch's."""
    mine, theirs, data = made("cnn")
    compiled = torch.compile(mine, backend="onnxplug", options={"fallback": False})
    norms = []
    for run, model in ((theirs, theirs), (compiled, mine)):
        torch.manual_seed(5)
        for step in range(3):
            (run(*data(step)) / 3).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(norms[1], norms[0], **looser("gradients"))
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **looser("gradients"))


@pytest.mark.long
@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9's own backends give other shapes")
@pytest.mark.parametrize(
    ("settings", "training"),
    rotated([{"batch_first": True}, {"num_layers": 2, "bidirectional": True}], [True, False], every=2),
)
def test_an_lstm_on_plain_inputs(settings: dict[str, Any], training: bool) -> None:
    """Where the input needs no gradient torch takes oneDNN's layer, and its other backends can't train it."""
    layer = nn.LSTM(4, 6, **settings)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="onnxplug", options={"fallback": False})
    with torch.set_grad_enabled(training):
        for steps in (3, 5):
            x = torch.randn(2, steps, 4)
            got, expected = compiled(x), eager(x)
            torch.testing.assert_close(got, expected)
            if training:
                got[0].square().sum().backward()
                expected[0].square().sum().backward()
    for one, other in zip(layer.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("name", ["det", "slogdet"])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_determinants(name: str, turned: bool) -> None:
    """The backward reads factors of the matrix or of its transpose, by the matrix's strides."""
    torch.manual_seed(0)
    matrix = torch.randn(3, 3) + 2 * torch.eye(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        result = getattr(torch.linalg, name)(x.mT if turned else x)
        return result if name == "det" else result[1]

    gradients = []
    for called in (function, torch.compile(function, backend="onnxplug", options={"fallback": False})):
        leaf = matrix.clone().requires_grad_()
        called(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
