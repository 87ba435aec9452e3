"""Models that transform functions within forward: gradients, Jacobians, vmap over what torch.export can't see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp

import onnxplug
from onnxplug import CaptureError
from onnxplug.capture.mentions import Mentions
from onnxplug.capture.transforms import names_transforms, traced_below
from onnxplug.torch_private import transforms_depth
from tests.support.check import Call, check
from tests.support.releases import not_with
from tests.support.tolerances import looser

torch.manual_seed(0)
X = torch.randn(3, 4)
OTHERS = [(torch.randn(7, 4) * 3,), (torch.randn(1, 4),)]
BATCH = ({0: "batch"},)
CONSTANT = torch.randn(4, 4)


class Energy(torch.nn.Module):
    """A network whose result is used through a gradient: forces of an energy, scores of a density."""

    def __init__(self, of: Callable[[torch.nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        self.of = of

    def forward(self, x: torch.Tensor) -> Any:
        return self.of(self.network, x)


def forces(network: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return -torch.autograd.grad(network(x).square().sum(), x)[0]


def samples(network: torch.nn.Module, x: torch.Tensor) -> Any:
    """The gradient of the weights for each sample."""

    def loss(weights: Any, row: torch.Tensor) -> torch.Tensor:
        return functional_call(network, weights, (row,)).square().mean()

    return torch.vmap(grad(loss), in_dims=(None, 0))(dict(network.named_parameters()), x)


def linear_part(_: torch.nn.Module, x: torch.Tensor) -> Any:
    result, along = linearize(lambda z: z.sin() * z.sum(), x)
    return result, along(torch.ones_like(x))


def pulled_back(network: torch.nn.Module, x: torch.Tensor) -> Any:
    result, back = vjp(network, x)
    return result, back(torch.ones_like(result))[0]


GRADIENTS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "autograd.grad": forces,
    "grad": lambda network, x: grad(lambda z: network(z).square().sum())(x),
    "grad_and_value": lambda network, x: grad_and_value(lambda z: network(z).square().sum())(x),
    "second derivative": lambda _, x: torch.vmap(torch.vmap(grad(grad(lambda z: z**3 * z.sin()))))(x),
    "vjp": pulled_back,
    "jacrev of each row": lambda network, x: torch.vmap(jacrev(network))(x),
    "gradients of weights": samples,
    "functionalize": lambda _, x: torch.func.functionalize(lambda z: z.clone().add_(1))(x),
    "a tensor from outside": lambda _, x: torch.vmap(lambda row: CONSTANT @ row)(x),
    "out_dims": lambda _, x: torch.vmap(lambda row: row * 2, out_dims=1)(x),
    "jacfwd": lambda _, x: jacfwd(lambda z: z.sin() * z.sum())(x.sum(1)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_any_batch(name: str) -> None:
    program = check(Energy(GRADIENTS[name]).eval(), X, others=OTHERS, dynamic=BATCH, **looser("gradients"))
    assert program.statistics.strategy == "non-strict, below autograd and functorch"
    assert program.statistics.decomposed == ()


STATIC: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "jacrev": lambda network, x: jacrev(network)(x),
    "jacfwd": lambda network, x: jacfwd(network)(x),
    "hessian": lambda network, x: hessian(lambda z: network(z).sum())(x),
    "hessian of each row": lambda network, x: torch.vmap(hessian(lambda z: network(z).sum()))(x),
    "linearize": linear_part,
}


@pytest.mark.parametrize("name", STATIC)
def test_static(name: str) -> None:
    check(Energy(STATIC[name]).eval(), X, others=[(torch.randn(3, 4) * 2,)], **looser("gradients"))


def test_weights_keep_their_names() -> None:
    model = Energy(forces).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=BATCH)
    assert {"network.0.weight", "network.0.bias"} <= set(program.model.graph.initializers)
    assert [value.name for value in program.model.graph.inputs] == ["x"]
    program.apply_weights({name: tensor * 2 for name, tensor in model.state_dict().items()})
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    torch.testing.assert_close(program(X)[0], model(X), **looser("gradients"))


def test_the_model_is_left_as_it_was() -> None:
    model = Energy(forces).eval()
    onnxplug.to_onnx(model, (X,))
    assert "forward" not in vars(model)
    own = Call(torch.relu)
    own.forward = lambda x: x.sin()  # type: ignore[method-assign]
    kept = own.forward
    with traced_below(own):
        assert own.forward is not kept
    assert own.forward is kept


def test_buffers_that_are_written() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)  # type: ignore[operator]
            return grad(lambda z: (z.sin() * self.calls).sum())(x)

    program = onnxplug.to_onnx(Counting().eval(), (X,), dynamic_shapes=BATCH)
    assert [slot.name for slot in program.slots][1:] == ["calls_out"]
    assert program.verify().cases


def test_a_branch_on_sizes_is_reported() -> None:
    def by_size(x: torch.Tensor) -> Any:
        return grad(lambda z: (z.sin() if x.shape[0] > 2 else z.cos()).sum())(x)

    with pytest.warns(UserWarning, match="right only where batch >= 3"):
        program = onnxplug.to_onnx(by_size, (X,), dynamic_shapes=BATCH)
    assert min(case.sizes["batch"] for case in program.verify().cases) > 2


def test_a_capture_that_fails_leaves_no_transform_open() -> None:
    def failing(x: torch.Tensor) -> Any:
        def inner(row: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not this one")

        return torch.vmap(inner)(x)

    with pytest.raises(CaptureError, match="not this one"):
        onnxplug.to_onnx(failing, (X,))
    assert transforms_depth() == 0
    assert torch.rand(2).shape == (2,)  # within a vmap it would be refused


def test_strict_alone_is_strict() -> None:
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(Energy(forces).eval(), (X,), strict=True)


@pytest.mark.parametrize(("model", "expected"), [(Energy(forces), True), (torch.nn.Linear(2, 2), False)])
def test_names_transforms(model: torch.nn.Module, expected: bool) -> None:
    assert names_transforms(Mentions(model)) is expected


def test_a_program_whose_constants_have_no_values() -> None:
    """torch.export leaves the constants of a gradient without values, and raises no error."""
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = torch.zeros(2)
    name = "network.bias"
    program.graph_signature.input_specs[1].kind = torch.export.graph_signature.InputKind.CONSTANT_TENSOR
    program.graph_signature.input_specs[1].target = name
    program.constants[name] = fake
    program._state_dict.pop("bias")
    with pytest.raises(CaptureError, match="without its values"):
        onnxplug.to_onnx(program)


TANGENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "matmul": lambda x: x @ x.mT,
    "std": lambda x: x.std(1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "cross_entropy": lambda x: torch.nn.functional.cross_entropy(x, x.new_zeros(x.shape[0], dtype=torch.int64)),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize(
    "name",
    [
        *sorted(set(TANGENTS) - {"attention"}),
        pytest.param("attention", marks=not_with("2.15", "has no forward-mode derivative of attention on a CPU")),
    ],
)
def test_tangents_of_composite_operators(name: str) -> None:
    program = check(lambda x: jvp(TANGENTS[name], (x,), (x.cos(),)), X, others=OTHERS, dynamic=BATCH, **looser("core"))
    assert program.statistics.strategy.endswith("below autograd and functorch")


@not_with("2.9", "does not export jvp of composite operators")
def test_a_failure_closes_the_level_of_tangents() -> None:
    module = Call(lambda x: jvp(TANGENTS["softmax"], (x,), (x.cos(),)))
    exported = torch.export.export(module, (X,))
    with pytest.raises(CaptureError, match="torch can't decompose the program"):
        onnxplug.to_onnx(exported)
    assert transforms_depth() == 0
    torch.testing.assert_close(module(X), jvp(TANGENTS["softmax"], (X,), (X.cos(),)))
