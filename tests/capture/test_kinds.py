"""Classes and attributes that the model's code asks for are PyTorch's, not those of a trace."""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check

X, OTHERS = torch.randn(4, 3), [(torch.randn(2, 3),), (torch.randn(1, 3),)]
Function = Callable[[torch.Tensor], Any]


class Weight(nn.Parameter):
    """A parameter of a class that only marks it."""


class Named(nn.Module):
    """A weight with attributes, and a buffer."""

    def __init__(self, function: Callable[[Any, torch.Tensor], bool]) -> None:
        super().__init__()
        self.weight, self.marked = nn.Parameter(torch.ones(3)), Weight(torch.full((3,), 2.0))
        self.weight.scale = 5.0  # type: ignore[attr-defined]
        self.register_buffer("shift", torch.ones(3))
        self.shift.offset = torch.tensor(4.0)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.weight if self.function(self, x) else x * 3 + self.marked


def self_class(self: Any) -> str:
    """The first operand is called self, but the function is no method."""
    return (lambda item: item.__class__.__name__)(self)  # type: ignore[no-any-return]


def matched(item: Any) -> str:
    match item:
        case int():
            return "int"
        case float():
            return "float"
        case Weight():
            return "Weight"
        case torch.Tensor():
            return "tensor"
        case _:
            return "other"


@functools.singledispatch
def dispatched(item: Any) -> str:
    return "other"


dispatched.register(int, lambda item: "int")
dispatched.register(torch.Tensor, lambda item: "tensor")


ASKS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "type of an input": lambda m, x: type(x) is torch.Tensor,
    "type of a result": lambda m, x: type(x + 1) in (torch.Tensor, nn.Parameter),
    "type of a weight": lambda m, x: type(m.weight) is nn.Parameter and type(m.shift) is torch.Tensor,
    "type of a size": lambda m, x: type(x.shape[0]) is int,
    "type of a truth": lambda m, x: type(x.shape[0] > 2) is bool,
    "type of a type": lambda m, x: type(type(x)) is type(torch.Tensor) and type(int) is type,
    "a generic alias": lambda m, x: type[int].__origin__ is type and type[int].__args__ == (int,),
    "name of a type": lambda m, x: type(x).__name__ == "Tensor",
    "type of the model": lambda m, x: type(m) is Named and type(m.function).__name__ == "function",
    "isinstance of a size": lambda m, x: isinstance(x.shape[0], int),
    "isinstance of some": lambda m, x: isinstance(x.shape[0], str | float | int),
    "isinstance of a number": lambda m, x: isinstance(x.shape[0], numbers.Number),
    "isinstance of a quotient": lambda m, x: isinstance(x.shape[0] / 2, float) and not isinstance(x.shape[0] / 2, int),
    "isinstance of a truth": lambda m, x: isinstance(x.shape[0] > 2, bool),
    "isinstance of an item": lambda m, x: isinstance(x.sum().item(), float),
    "isinstance of a weight": lambda m, x: isinstance(m.weight, nn.Parameter) and not isinstance(m.shift, nn.Parameter),
    "isinstance of a class": lambda m, x: isinstance(m.marked, Weight) and not isinstance(m.weight, Weight),
    "isinstance of a type": lambda m, x: isinstance(int, type) and not isinstance(x, type) and issubclass(type(int), type),
    "no list": lambda m, x: not isinstance(x, list | tuple) and not isinstance(x.shape[0], list),
    "attribute of a weight": lambda m, x: getattr(m.weight, "scale", 1.0) == 5.0 and not hasattr(m.marked, "scale"),
    "attribute of a buffer": lambda m, x: hasattr(m.shift, "offset"),
    "class attribute": lambda m, x: x.__class__ is torch.Tensor and m.weight.__class__ is nn.Parameter and x.shape[0].__class__ is int,
    "name of a class": lambda m, x: x.__class__.__name__ == "Tensor" and getattr(x.sum().item(), "__class__") is float,  # noqa: B009
    "class of the model": lambda m, x: m.__class__ is Named and self_class(m.marked) == "Weight" and "a".__class__ is str,
    "match of a size": lambda m, x: matched(x.shape[0]) == "int" and matched(x.shape[0] / 2) == "float",
    "match of a tensor": lambda m, x: matched(x) == "tensor" and matched(m.marked) == "Weight" and matched(None) == "other",
    "single dispatch": lambda m, x: dispatched(x.shape[0]) == "int" and dispatched(x) == "tensor" and dispatched("") == "other",
    "a class that is made": lambda m, x: isinstance(type("Made", (dict,), {"a": 1})(), dict),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKS)
def test_classes_and_attributes(name: str) -> None:
    model = Named(ASKS[name])
    assert ASKS[name](model, X)
    check(model, X, others=OTHERS, dynamic=({0: "n"},))
    assert not {"type", "isinstance"} & globals().keys()


def test_a_method_by_its_name_as_a_text() -> None:
    class Found(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = getattr(self, "_".join(["asked", "kind"]))(x)
            return result

        def asked_kind(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if isinstance(x.shape[0], int) else x * 3

    check(Found(), X, others=OTHERS, dynamic=({0: "n"},))


def test_a_tensor_that_a_weight_holds() -> None:
    """The tensor's numbers are a constant of the model, as those of every tensor that is no buffer."""

    class Held(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self.weight, "scale", 1.0)

    model = Held(3, 2)
    model.weight.scale = torch.tensor([3.0, 5.0])  # type: ignore[assignment]
    check(model, X, others=OTHERS, dynamic=({0: "n"},))


def test_attributes_of_an_input() -> None:
    x = X.clone()
    x.scale = 3.0  # type: ignore[attr-defined]
    program = onnxplug.to_onnx(lambda x: x * getattr(x, "scale", 1.0), (x,))
    torch.testing.assert_close(program(x)[0], X * 3)


class Twice(nn.Module):
    """A layer that is held in several places."""

    def __init__(self, ask: Callable[[Any], bool]) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(3, 3)
        self.layers = nn.ModuleList([self.a, nn.ReLU(), self.a])
        self.held, self.numbers, self.ask = [self.a], {id(self.a): 1, self.a: 2}, ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if self.ask(self) else self.b(x) * 2


SAME: dict[str, Callable[[Any], bool]] = {
    "is": lambda m: m.a is m.b and m.layers[0] is m.layers[2],
    "in": lambda m: m.b in m.held and list(m.layers).index(m.a) == 0,
    "key": lambda m: m.numbers.get(id(m.b)) == 1 and m.numbers.get(m.layers[2]) == 2,
    "modules": lambda m: len(list(m.modules())) == 4 and len({m.a, m.b, *m.layers}) == 2,
    "class": lambda m: type(m.a) is nn.Linear and isinstance(m.layers[1], nn.ReLU),
}


@pytest.mark.parametrize("name", SAME)
def test_a_module_that_is_held_twice(name: str) -> None:
    model = Twice(SAME[name])
    assert SAME[name](model)
    check(model, X, others=OTHERS, dynamic=({0: "n"},), atol=1e-6)


class Tripled(torch.Tensor):
    """Its sums are three times as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            return made * 3 if func is torch.add else made


class Held(nn.Module):
    def __init__(self, held: torch.Tensor, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.held, x)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_class_with_code_of_its_own_is_named(is_buffer: bool) -> None:
    """torch.export calls no code of the class."""
    model = Held(torch.ones(3).as_subclass(Tripled), is_buffer)
    with pytest.warns(UserWarning, match=r"takes self\.held \(Tripled\) for a plain tensor.*__torch_function__"):
        program = onnxplug.to_onnx(model, (X,))
    with pytest.raises(onnxplug.VerificationError):
        program.verify()


def test_an_input_of_such_a_class() -> None:
    with pytest.warns(UserWarning, match=r"takes x \(Tripled\) for a plain tensor"):
        onnxplug.to_onnx(lambda x: x * 2, (torch.ones(3).as_subclass(Tripled),))


def test_a_class_without_code_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxplug.to_onnx(Named(ASKS["isinstance of a class"]), (X,), verify=True)
