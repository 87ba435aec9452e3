"""ScriptModules within ordinary modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.scripts import check_script, scripted, traced

X, Y = torch.randn(2, 3), torch.randn(5, 3)
BATCH = ({0: "batch"},)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("level", torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: float = 2.0):
        self.level = self.level * 0.5 + x.mean(0)
        if x.sum() > 0:
            x = self.linear(x)
        return x * scale + self.level


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([scripted(nn.Sequential(nn.Linear(3, 3), nn.GELU())), nn.Linear(3, 3)])
        self.inner = nn.Sequential(nn.Tanh(), nn.Sequential(traced(nn.Linear(3, 3), X), nn.ReLU()))
        self.again = self.layers[0]
        self.absent = None
        self.plain = nn.Linear(3, 3)
        self.plain.weight = self.again[0].weight  # type: ignore[index]
        self.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.plain(self.again(self.inner(x))) * self.factor


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = scripted(Gate())

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return self.gate(x, scale=0.5) + shift


def test_scripts_among_other_modules() -> None:
    model = Parts().eval()
    parts = list(model.modules())
    program = check_script(model, (X,), (Y,), dynamic=BATCH)
    weights = {name for name in model.state_dict() if name.endswith("weight")}
    assert weights - {"again.0.weight", "plain.weight"} <= set(program.model.graph.initializers)
    assert all(old is new for old, new in zip(parts, model.modules(), strict=True))


def test_branches_and_state_of_a_part() -> None:
    model = Gated()
    program = onnxplug.to_onnx(
        model, (X,), kwargs={"shift": X}, dynamic_shapes={"x": {0: "batch"}, "shift": {0: "batch"}}
    )
    assert any(node.op_type == "If" for node in program.model.graph)
    assert [value.name for value in program.model.graph.outputs][1:] == ["gate.level_out"]
    for x in (X, Y.abs(), -Y.abs()):
        program.verify(args=(x,), kwargs={"shift": x + 1}, seeds=())
    assert model.gate.level.equal(torch.zeros(3))


def test_hooks_of_the_modules_around() -> None:
    model = Parts().eval()
    model.inner.register_forward_hook(lambda module, args, result: result * 2 + len(module))
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    check_script(model, (X,), (Y,), dynamic=BATCH)


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parents = [parent]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parents[0].script(x) * self.parents[0].gain


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.script = scripted(nn.Linear(3, 3))
        self.child = Child(self)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain = 3.0
        return self.child(x)


def test_modules_that_know_the_module_around_them() -> None:
    model = Parent()
    model.forward = model.forward  # type: ignore[method-assign]  # bound to the model
    check_script(model, (X,), (Y,), dynamic=BATCH)
    assert isinstance(model.script, torch.jit.ScriptModule)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.script = scripted(nn.Linear(3, 3))
        self.scripts = [self.script]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scripts[0](x)


def test_a_script_that_is_called_from_elsewhere() -> None:
    model = Outside()
    with pytest.raises(onnxplug.CaptureError, match=r"test_parts.py:\d+: TypeError: Linear.forward"):
        onnxplug.to_onnx(model, (X,))
    assert isinstance(model.script, torch.jit.ScriptModule)
