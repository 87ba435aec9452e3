"""Modules that look alike and are not: equal operator calls repeated, or each traced, the program is the same.

All of a model's Python code runs for every module, so nothing here has to be foreseen by the capture; the cases are those at which a
capture that compares modules goes wrong.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import onnxplug
from tests.support.sampling import rotated
from tests.support.tolerances import LOOSER
from tests.support.traces import both

X = torch.randn(2, 6, 8)
OTHER = torch.randn(3, 4, 8)
DYNAMIC: Any = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)


class Inner(nn.Module):
    """A linear layer, and what attributes make of its result."""

    gain = 1.0
    numbers = itertools.count(1)
    calls: ClassVar[list[int]] = []

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        window = getattr(self, "window", None)
        if window is not None:
            x = x - x.roll(window, 1)
        if hasattr(self, "scale"):
            x = x * self.scale
        return x * self.gain


class Stage(nn.Module):
    """Two inner blocks, and a function of the stage after them."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner or (Inner(), Inner()))
        self.drop = nn.Dropout(0.1)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = x + block(x)
        return self.function(self, x)


def stages(function: Callable[[Any, torch.Tensor], torch.Tensor], change: Callable[[Any], None] | None = None) -> Any:
    """Three stages of two inner blocks, the second stage or the blocks within changed."""
    model = nn.Sequential(*(Stage(function) for _ in range(3)))
    if change is not None:
        change(model)
    return model.eval()


def same(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return x


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Counted:
    def __init__(self, held: Any) -> None:
        self.held = held


class Whole(int):
    """An int with an attribute."""

    factor = 1.0


class Settings(dict[str, float]):
    """A dict with an attribute."""

    factor = 1.0


FEATURES: list[torch.Tensor] = []
REGISTRY: dict[int, float] = {}
DEPTH = contextvars.ContextVar("DEPTH", default=0)
COUNTER = 0


def dilated(model: Any) -> None:
    for i, stage in enumerate(model):
        stage.inner = nn.ModuleList(nn.Conv1d(8, 8, 3, padding="same", dilation=1 + (i == 1 and j)) for j in range(2))
        stage.forward = functools.partial(convolved, stage)


def convolved(stage: Any, x: torch.Tensor) -> torch.Tensor:
    for block in stage.inner:
        x = x + block(x.transpose(1, 2)).transpose(1, 2)
    return x


def in_second(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: object.__setattr__(model[1].inner[1], name, value)


def in_all(name: str, value: Any) -> Callable[[Any], None]:
    """A change that lets all stages share one object."""

    def change(model: Any) -> None:
        for stage in model:
            object.__setattr__(stage, name, value)

    return change


def counting_slots(stage: Any, x: torch.Tensor) -> torch.Tensor:
    stage.shared.count += 1
    return x * stage.shared.count


def counting_array(stage: Any, x: torch.Tensor) -> torch.Tensor:
    stage.shared[0] += 1
    return x * float(stage.shared[0])


def counting_deque(stage: Any, x: torch.Tensor) -> torch.Tensor:
    stage.shared.append(len(stage.shared))
    return x * len(stage.shared)


def counting_deep(stage: Any, x: torch.Tensor) -> torch.Tensor:
    held = stage.shared.held.held
    held["n"] = held.get("n", 0) + 1
    return x * held["n"]


def reading_parent(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + list(stage.parent()).index(stage))


def linked(model: Any) -> None:
    for stage in model:
        object.__setattr__(stage, "parent", weakref.ref(model))


def closed_over(model: Any) -> None:
    for i, stage in enumerate(model):
        stage.function = times(i, model)


def times(number: int, model: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda stage, x: x * (number + len(model))


def counting_class(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return x * next(Inner.numbers)


def collecting(stage: Any, x: torch.Tensor) -> torch.Tensor:
    FEATURES.append(x)
    return x + sum(f.mean() for f in FEATURES)


def counting_helper(stage: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNTER
    COUNTER += 1
    return x * COUNTER


def decorated(function: Any) -> Any:
    calls = itertools.count(1)

    @functools.wraps(function)
    def inner(stage: Any, x: torch.Tensor) -> torch.Tensor:
        return function(stage, x) * next(calls)

    return inner


def in_context(stage: Any, x: torch.Tensor) -> torch.Tensor:
    DEPTH.set(DEPTH.get() + 1)
    return x * DEPTH.get()


def registered(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return x * REGISTRY[id(stage)]


def register(model: Any) -> None:
    REGISTRY.clear()
    REGISTRY.update({id(stage): float(i + 1) for i, stage in enumerate(model)})


class Scaling(torch.overrides.TorchFunctionMode):
    """Scales what a sine gives."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * self.factor if function in (torch.sin, torch.Tensor.sin) else result


def in_modes(stage: Any, x: torch.Tensor) -> torch.Tensor:
    for factor in (2.0, 3.0):  # the second mode may have the address of the first one, which is freed
        with Scaling(factor):
            x = x.sin()
    return x


def with_attributes(make: Callable[[float], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for i, stage in enumerate(model):
            object.__setattr__(stage, "number", make(float(i + 1)))

    return change


def whole(factor: float) -> Whole:
    number = Whole(1)
    number.factor = factor
    return number


def settings_of(factor: float) -> Settings:
    container = Settings(a=1.0)
    container.factor = factor
    return container


def other_drop(model: Any) -> None:
    model[1].drop.p = 0.5


def vars_of(module: Any) -> float:
    return float(vars(module)["number"])


def replaced(model: Any) -> None:
    model[1].inner[1].forward = lambda x: x * 3


#: Name to a function that makes the model anew, with its state as at the start.
CASES: dict[str, Callable[[], nn.Module]] = {
    "another dilation in an inner block": lambda: stages(same, dilated),
    "another scale in an inner block": lambda: stages(same, in_second("scale", 3.0)),
    "a window that one inner block has": lambda: stages(same, in_second("window", 2)),
    "an attribute that one has": lambda: stages(
        lambda s, x: x * s.extra if hasattr(s, "extra") else x, lambda m: setattr(m[1], "extra", 2.0)
    ),
    "a class default overridden": lambda: stages(same, in_second("gain", 3.0)),
    "a method replaced": lambda: stages(same, replaced),
    "state in slots": lambda: stages(counting_slots, in_all("shared", Slotted())),
    "state in an array": lambda: stages(counting_array, in_all("shared", np.zeros(1))),
    "state in a deque": lambda: stages(counting_deque, in_all("shared", collections.deque(maxlen=5))),
    "state two objects deep": lambda: stages(counting_deep, in_all("shared", Counted(Counted({})))),
    "a weak reference to the parent": lambda: stages(reading_parent, linked),
    "a closure over the parent": lambda: stages(same, closed_over),
    "a count of the class": lambda: stages(counting_class),
    "features in a global list": lambda: stages(collecting),
    "a counter in a helper": lambda: stages(counting_helper),
    "a counter under a decorator": lambda: stages(decorated(same)),
    "a context variable": lambda: stages(in_context),
    "a registry by id": lambda: stages(registered, register),
    "modes of one address": lambda: stages(in_modes),
    "an int with an attribute": lambda: stages(lambda s, x: x * s.number * s.number.factor, with_attributes(whole)),
    "a dict with an attribute": lambda: stages(
        lambda s, x: x * s.number["a"] * s.number.factor, with_attributes(settings_of)
    ),
    "an attribute of a child": lambda: stages(lambda s, x: x * s.drop.p, other_drop),
    "attributes by vars": lambda: stages(lambda s, x: x * vars_of(s), with_attributes(lambda n: n)),
    "children in another order": lambda: stages(same, lambda m: setattr(m[1], "inner", m[1].inner[::-1])),
    "an inner block of another stage": lambda: stages(
        lambda s, x: s.other(x) if hasattr(s, "other") else x,
        lambda m: object.__setattr__(m[2], "other", m[0].inner[0]),
    ),
}


@pytest.fixture(autouse=True)
def _state() -> None:
    """Resets globals to their state at import."""
    reset()


def reset() -> None:
    global COUNTER
    COUNTER = 0
    FEATURES.clear()
    DEPTH.set(0)
    Inner.numbers = itertools.count(1)


def afresh(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        reset()
        return make()

    return made


@pytest.mark.parametrize("name", rotated(CASES, every=4))
def test_programs_of_modules_that_look_alike(name: str) -> None:
    assert both(afresh(CASES[name]), X, dynamic_shapes=DYNAMIC).repeated > 0


@pytest.mark.parametrize("name", CASES)
def test_modules_that_look_alike(name: str) -> None:
    make = afresh(CASES[name])
    torch.manual_seed(0)
    model = make()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=DYNAMIC)
    assert program.statistics.repeated > 0
    torch.manual_seed(0)
    expected = make()(OTHER)  # with the state at the start, and of other sizes
    torch.testing.assert_close(program(OTHER)[0], expected, rtol=LOOSER["core"].rtol, atol=LOOSER["core"].atol)


# -- generated trees -----------------------------------------------------------------------------------------------------

#: Actions of a generated tree's module after its children; each action reads something else.
ACTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda m, x: x,
    "scale": lambda m, x: x * getattr(m, "scale", 1.0),
    "gain": lambda m, x: x + m.gain,
    "window": lambda m, x: x - x.roll(m.window, 1) if hasattr(m, "window") else x,
    "axis": lambda m, x: x.softmax(getattr(m, "window", 0) % 3),
    "shared": lambda m, x: x * (m.shared.__setitem__("n", m.shared["n"] + 1) or m.shared["n"]),
    "global": lambda m, x: (FEATURES.append(x), x + FEATURES[0].mean())[1],
    "training": lambda m, x: x * 2 if m.training else x.relu(),
    "sizes": lambda m, x: x.flatten(0, 1).view(x.shape) * x.shape[1],
    "written": lambda m, x: x.clone().mul_(getattr(m, "scale", 2.0)),
    "view": lambda m, x: (lambda y: (y[:, 0].add_(m.gain), y)[1])(x + 1),
    "parts": lambda m, x: torch.cat(x.chunk(2, 2)[:: -1 if hasattr(m, "window") else 1], 2),
    "autocast": lambda m, x: in_autocast(hasattr(m, "scale"), x),
    "half": lambda m, x: x.half().float() if getattr(m, "scale", 0) > 1 else x,
    "bias": lambda m, x: x + m.bias,
    "two": lambda m, x: (lambda y: y * (y if hasattr(m, "scale") else x))(x.tanh()),
}


def in_autocast(enabled: bool, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        return (x @ torch.ones(8, 8)).float()


class Tree(nn.Module):
    """A module with children, actions and attributes."""

    gain = 0.5

    def __init__(self, children: list[Tree], actions: list[str], attributes: dict[str, Any], shared: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.actions = actions
        self.bias = nn.Parameter(torch.randn(8))
        object.__setattr__(self, "shared", shared)
        for name, value in attributes.items():
            if name == "training":
                self.training = value
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x) * 0.5
        for action in self.actions:
            x = ACTIONS[action](self, x)
        return x


ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.sampled_from([0.5, 2.0, -0.0]),
        "gain": st.sampled_from([0.25, 1, True]),
        "window": st.sampled_from([1, 2]),
        "training": st.booleans(),
    },
)


@st.composite
def trees(draw: Any) -> Callable[[], nn.Module]:
    """A tree of two levels whose branches are alike: the same actions, attributes that differ here and there."""
    outer, inner = (draw(st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=3)) for _ in range(2))
    shape = draw(st.lists(st.lists(ATTRIBUTES, min_size=1, max_size=2), min_size=2, max_size=3))
    attributes = [draw(ATTRIBUTES) for _ in shape]

    def make() -> nn.Module:
        reset()
        shared = {"n": 0}
        branches = [
            Tree([Tree([], inner, a, shared) for a in row], outer, own, shared)
            for row, own in zip(shape, attributes, strict=True)
        ]
        return Tree(branches, ["nothing"], {"training": False}, shared)

    return make


@settings(max_examples=6, deadline=None)
@given(trees())
def test_generated_trees(make: Callable[[], nn.Module]) -> None:
    both(make, X, dynamic_shapes=DYNAMIC)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(trees(), st.sampled_from([None, DYNAMIC]))
def test_many_generated_trees(make: Callable[[], nn.Module], dynamic: Any) -> None:
    both(make, X, dynamic_shapes=dynamic)
