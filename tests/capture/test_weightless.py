"""Models whose weights have no values are exported like models whose weights have values."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import onnxplug
from onnxplug import CaptureError, WeightsError
from onnxplug.fake import is_fake
from onnxplug.torch_private import FakeTensorMode
from tests.support.tolerances import looser
from tests.support.weightless import MODELS, WAYS, Rotary, Tied, seeded, state_of

SHAPES = ({0: torch.export.Dim("batch", min=1)},)


def close(results: Any, expected: Any) -> None:
    for result, wanted in zip(results, tree_leaves(expected), strict=True):
        torch.testing.assert_close(result, wanted, **looser("core"))


def text(program: onnxplug.OnnxProgram) -> tuple[Counter[str], list[tuple[str | None, str]]]:
    """The graph without its weights' contents."""
    graph = program.model.graph
    return Counter(n.op_type for n in graph), [(n, f"{v.dtype} {v.shape}") for n, v in graph.initializers.items()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_later(name: str, way: str) -> None:
    with seeded(1):
        real = MODELS[name]().eval()
        for tensor in state_of(real).values():
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                tensor.data.add_(torch.rand_like(tensor) * 0.1)
        first, second = torch.randn(2, 3, 4), torch.randn(5, 3, 4) * 2
    fake = WAYS[way](MODELS[name]).eval()
    assert all(map(is_fake, fake.parameters()))
    program = onnxplug.to_onnx(fake, (first,), dynamic_shapes=SHAPES)
    assert text(program) == text(onnxplug.to_onnx(real, (first,), dynamic_shapes=SHAPES))
    with pytest.raises(WeightsError, match=r"the model can't run: .* no numbers, '.*") as error:
        program(first)
    assert set(error.value.names) <= state_of(real).keys()
    program.apply_weights(state_of(real))
    with torch.no_grad():
        for x in (first, second):
            close(program(x), real(x))


def test_the_model_is_left_as_it_was() -> None:
    fake = WAYS["meta"](lambda: nn.Sequential(Tied(), nn.LSTM(10, 3)))

    def tensors() -> dict[str, torch.Tensor]:
        return {**dict(fake.named_parameters(remove_duplicate=False)), **dict(fake.named_buffers())}

    before = tensors()
    flat = [id(weight) for weight in fake[1]._flat_weights]
    onnxplug.to_onnx(fake.eval(), (torch.randn(2, 3, 4),))
    assert all(tensor is before[name] for name, tensor in tensors().items())
    assert [id(weight) for weight in fake[1]._flat_weights] == flat


def test_inputs_without_numbers() -> None:
    x = torch.randn(2, 3, 4)
    with FakeTensorMode() as mode:
        faked = torch.empty(2, 3, 4)
    model = Tied().eval()
    for inputs in (x.to("meta"), faked):
        program = onnxplug.to_onnx(model, (inputs,), dynamic_shapes=SHAPES)
        close(program(x), model(x))
    with mode:  # where every tensor that torch makes is fake
        program = onnxplug.to_onnx(model, (x,), dynamic_shapes=SHAPES)
    close(program(x), model(x))


def test_a_tensor_that_is_no_weight() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.offset = torch.ones(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.offset

    with pytest.raises(CaptureError, match="as plain attributes: offset"):
        onnxplug.to_onnx(WAYS["meta"](Model), (torch.randn(4),))
    model = WAYS["fake_weights"](Model)
    program = onnxplug.to_onnx(model, (torch.randn(4),))
    program.apply_weights({"weight": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    torch.testing.assert_close(program(torch.ones(4))[0], torch.tensor([2.0, 3.0, 4.0, 5.0]))


def test_buffers_that_are_computed() -> None:
    x, real = torch.randn(2, 3, 4), Rotary()
    program = onnxplug.to_onnx(WAYS["meta"](Rotary), (x,))
    program.apply_weights(real.state_dict())
    with pytest.raises(WeightsError, match=r"No checkpoint has 'frequencies'.*fake_weights"):
        program(x)
    program.apply_weights({"frequencies": real.frequencies})
    close(program(x), real(x))
    program = onnxplug.to_onnx(WAYS["fake_weights"](Rotary), (x,))
    program.apply_weights(real.state_dict())
    close(program(x), real(x))


def test_verification_says_that_there_is_nothing_to_compare_with() -> None:
    x = torch.randn(2, 3, 4)
    program = onnxplug.to_onnx(WAYS["meta"](Tied), (x,))
    with pytest.raises(WeightsError, match=r"can't be verified: 3 weights have no numbers, 'embedding.weight'"):
        program.verify()
    program.apply_weights(Tied().state_dict())
    with pytest.raises(onnxplug.VerificationError, match="the weights of the PyTorch model have no numbers"):
        program.verify()


class Shared(nn.Module):
    """A parameter that two attributes hold before either module has it."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.a, self.b = nn.ParameterList([weight]), nn.ParameterDict({"b": weight})
        self.register_parameter("nothing", None)
        self.own = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x @ self.a[0] + self.b["b"][0])


def test_fake_weights() -> None:
    register = nn.Module.register_parameter

    def fail() -> None:
        raise ValueError("of ours")

    with pytest.raises(ValueError, match="of ours"), onnxplug.fake_weights():
        fail()
    assert nn.Module.register_parameter is register
    with onnxplug.fake_weights():
        model = Shared()
    assert nn.Module.register_parameter is register
    assert not any(is_fake(p) for p in Shared().parameters())
    assert all(p.is_meta for p in model.parameters())
    assert model.a[0] is model.b["b"]
    assert not model.a[0].requires_grad
    assert model.own.weight.requires_grad
    assert type(model.own.weight) is nn.Parameter


def test_an_operator_that_needs_numbers_is_an_error() -> None:
    x = torch.randn(2, 3, 4)
    fake = WAYS["meta"](MODELS["linear"])
    with pytest.raises(WeightsError, match=r"pieces= runs the model.*3 weights of it have no numbers"):
        onnxplug.to_onnx(fake, (x,), pieces=["0"])
    assert "Load the model's weights" in str(onnxplug.diagnose(fake, (x,)))
    program = onnxplug.to_onnx(fake, (x,))
    for needs in (program.optimize, lambda: program.call_reference(x), lambda: program.model_proto):
        with pytest.raises(WeightsError, match=r"3 weights have no numbers, '0.weight', '0.bias', '2.weight'"):
            needs()
    program.apply_weights(MODELS["linear"]().state_dict())
    program.optimize()


def test_programs_and_functions_without_numbers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    real, x = make(), torch.randn(2, 3, 4)
    exported = torch.export.export(WAYS["fake"](make), (x,))
    fake = WAYS["meta"](make)
    for program in (onnxplug.to_onnx(exported), onnxplug.to_onnx(fake, (x,), functions=True)):
        with pytest.raises(WeightsError, match="no numbers"):
            program(x)
        program.apply_weights(real.state_dict())
        close(program(x), real(x))


class Folded(nn.Module):
    """Weights and buffers of one element, whose numbers a constant would be folded from."""

    def __init__(self) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.randn(()))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(self.steps)] * (self.exponent.exp() + 1) + self.steps


@pytest.mark.xfail(
    torch.__version__.startswith("2.9."), strict=True, reason="torch 2.9 slices by no number that the model computes"
)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_folded_from_weights_without_numbers(way: str) -> None:
    program = onnxplug.to_onnx(WAYS[way](Folded), (torch.randn(2, 4),))
    for steps in (2, 3):
        real = Folded()
        real.steps.fill_(steps)
        program.apply_weights(state_of(real))
        x = torch.randn(2, 4)
        close(program(x), real(x))


def test_fake_weights_of_two_threads_that_end_in_any_order() -> None:
    register = nn.Module.register_parameter
    events = [threading.Event() for _ in range(3)]
    made: list[nn.Module] = []

    def first() -> None:
        with onnxplug.fake_weights():
            events[0].set()
            assert events[1].wait(60)
        made.append(nn.Linear(2, 2))
        events[2].set()

    def second() -> None:
        assert events[0].wait(60)
        with onnxplug.fake_weights():
            events[1].set()
            assert events[2].wait(60)
            made.append(nn.Linear(2, 2))

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [module.weight.is_meta for module in made] == [False, True]
    assert nn.Module.register_parameter is register
