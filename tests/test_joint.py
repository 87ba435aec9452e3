"""to_onnx of a loss and its gradients: the graph that torch makes of an exported loss."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export.experimental import _export_forward_backward
from torch.func import functional_call

import onnxplug
from tests.support.tolerances import looser
from tests.support.training import MODELS, Data


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.model(given, targets),)


def joint(model: nn.Module, args: tuple[torch.Tensor, ...]) -> onnxplug.OnnxProgram:
    batch = torch.export.Dim("batch")
    program = torch.export.export(Loss(model), args, dynamic_shapes=({0: batch}, {0: batch}))
    return onnxplug.to_onnx(_export_forward_backward(program))


@pytest.mark.parametrize("name", ["cnn", *(pytest.param(n, marks=pytest.mark.long) for n in ("lstm", "transformer"))])
def test_loss_and_gradients_equal_eager(name: str) -> None:
    """Compares the gradients of every parameter at two batch sizes, and the statistics that the model updates."""
    make: Callable[[], nn.Module]
    data: Data
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make()
    for layer in model.modules():  # without random numbers: ONNX Runtime draws others
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(layer, nn.MultiheadAttention):
            layer.dropout = 0.0
    program = joint(copy.deepcopy(model), data(0))
    names = [output.name for output in program.model.graph.outputs]
    assert names[0] == "loss"
    for step in (0, 1):
        eager, args = copy.deepcopy(model), data(step)
        loss = eager(*args)
        loss.backward()
        expected = {"loss": loss, **{f"model.{n}_grad": p.grad for n, p in eager.named_parameters()}}
        expected |= {f"model.{n}_out": b for n, b in eager.named_buffers()}
        got = dict(zip(names, program(*args), strict=True))
        assert got.keys() <= expected.keys()
        assert {f"model.{n}_grad" for n, _ in eager.named_parameters()} <= got.keys()
        for output, value in got.items():
            torch.testing.assert_close(value, expected[output].detach(), msg=output, **looser("gradients"))


def test_the_gradient_of_an_input() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return ((x.sin() * x).square().mean(),)

    x = torch.randn(4, 3, requires_grad=True)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    made = onnxplug.to_onnx(_export_forward_backward(program))
    assert made.model.graph.outputs[0].name == "loss"
    for rows in (4, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        (loss,) = Model()(x)
        loss.backward()
        got = made(x.detach())
        torch.testing.assert_close(got[0], loss.detach())
        torch.testing.assert_close(got[1], x.grad)
    assert made.verify().cases


def test_gradients_of_inputs_are_called_after_them() -> None:
    """The weights are inputs, as they change from call to call."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3))

    class Model(nn.Module):
        def forward(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor]:
            return (functional_call(model, weights, (x,)).square().mean() + (x * weights["2.weight"].sum()).mean(),)

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(5, 4)
    shapes = (dict.fromkeys(weights), {0: torch.export.Dim("batch")})
    made = onnxplug.to_onnx(
        _export_forward_backward(torch.export.export(Model(), (weights, x), dynamic_shapes=shapes)),
    )
    names = [output.name for output in made.model.graph.outputs]
    inputs = [f"weights_{name.replace('.', '_')}" for name in weights]
    assert [value.name for value in made.model.graph.inputs] == [*inputs, "x"]
    assert names[0] == "loss"
    assert set(names[1:]) >= {f"{name}_grad" for name in inputs}
    (loss,) = Model()(weights, x)
    loss.backward()
    got = dict(zip(names, made({name: w.detach() for name, w in weights.items()}, x), strict=True))
    for name, weight in zip(inputs, weights.values(), strict=True):
        torch.testing.assert_close(got[f"{name}_grad"], weight.grad, **looser("gradients"))
