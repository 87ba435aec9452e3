"""Random numbers after a seed that the model's code sets: those of eager PyTorch, or others with a warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug

Function = Callable[[torch.Tensor], Any]


def after_seed(draw: Callable[[], torch.Tensor]) -> Function:
    def call(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x + draw()

    return call


def of_generator(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(4, generator=generator)
    return x * first + torch.rand(4, generator=generator)


def of_default_seed(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(4, generator=torch.Generator())


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        weight = torch.randn(4)
    return x + weight


def again(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    first = torch.rand(4)
    torch.manual_seed(1)
    return x + first - torch.rand(4)


def layer(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return nn.Linear(4, 3)(x)


def drawn_in_place(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(2)
    weight = torch.empty(4, 4).t()
    weight.normal_()
    weight[0].uniform_(-1, 1)
    weight[:, 1].bernoulli_(0.5)
    return x @ weight


CONSTANT: dict[str, Function] = {
    "manual_seed": after_seed(lambda: torch.rand(4)),
    "randn": after_seed(lambda: torch.randn(1, 4).double().float()),
    "randint": after_seed(lambda: torch.randint(-5, 5, (4,))),
    "randperm": after_seed(lambda: torch.randperm(4)),
    "normal": after_seed(lambda: torch.normal(1.0, 2.0, (4,))),
    "like a transposed constant": after_seed(lambda: torch.rand_like(torch.zeros(4, 5).t())[0, :4]),
    "empty": after_seed(lambda: torch.rand(0, 4).sum(0) + torch.rand(4)),
    "half": after_seed(lambda: torch.rand(4, dtype=torch.float16)),
    "item": after_seed(lambda: torch.full((4,), torch.rand(1).item())),
    "decides": after_seed(lambda: torch.ones(4) if torch.rand(1) > 0.4 else torch.zeros(4)),
    "generator": of_generator,
    "generator of the default seed": of_default_seed,
    "fork": forked,
    "again": again,
    "layer": layer,
    "in place": drawn_in_place,
}


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def exported(model: nn.Module, x: torch.Tensor) -> tuple[onnxplug.OnnxProgram, str]:
    """The program with a dynamic number of rows, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "rows"},))
    return program, " ".join(str(w.message) for w in caught)


@pytest.mark.parametrize("name", CONSTANT)
def test_numbers_after_a_seed_are_constants(name: str) -> None:
    model = Applied(CONSTANT[name])
    torch.manual_seed(0)  # the seed that the model sets too
    before = torch.get_rng_state()
    program, messages = exported(model, torch.randn(3, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)
    assert "test_seeds.py" in messages
    assert "they are constants of the exported model" in messages
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(program(x)[0], model(x))


def sized(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def sized_before(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    noise = torch.rand_like(x)
    return x + noise * 0 + torch.rand(4)  # which numbers these are depends on how many were drawn before


def dropped(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return F.dropout(x, 0.5, True)


def drawn_by_inputs(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.bernoulli(x.sigmoid())


def about_means(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.normal(x.mean(0), 1.0) + torch.normal(0.0, x.std(0)) + torch.normal(x.mean(0), x.std(0))


def branch(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    drawn = torch.cond(x.sum() > 0, lambda t: t + torch.rand(4), lambda t: t * 1, (x,))
    return drawn + torch.rand(4)


@pytest.mark.parametrize("function", [sized, sized_before, dropped, drawn_by_inputs, about_means, branch])
def test_numbers_of_dynamic_sizes_or_inputs_are_a_warning(function: Function) -> None:
    program, messages = exported(Applied(function), torch.randn(3, 4))
    assert "the exported model draws other numbers, anew at each run" in messages
    x = torch.rand(200, 4)
    assert not torch.equal(program(x)[0], program(x)[0])


def test_a_generator_that_is_set_back_is_a_warning() -> None:
    def replayed(x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.rand(4)
        torch.set_rng_state(state)
        return x + first - torch.rand(4)

    def forked(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            first = torch.rand(4)
        return x + first - torch.rand(4)

    for function in (replayed, forked):
        assert "draws the same numbers again" in exported(Applied(function), torch.randn(3, 4))[1]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4) + torch.rand(4, generator=self.generator)


def test_numbers_without_a_seed_are_drawn_at_each_run() -> None:
    """There is no warning, and the generators of the model and of torch keep their states."""
    model, x = Drawing(), torch.randn(3, 4)
    before = torch.get_rng_state(), model.generator.get_state()
    program, messages = exported(model, x)
    assert not messages
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(model.generator.get_state(), before[1])
    assert not torch.equal(program(x)[0], program(x)[0])


class Steps(nn.Module):
    """Sets seeds and draws at random places."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        self.steps = [drawn.choice(("seed", "seed", "draw", "like", "own", "fork", "made")) for _ in range(6)]
        self.seeds = [drawn.randrange(4) for _ in self.steps]
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for step, seed in zip(self.steps, self.seeds, strict=True):
            if step == "seed":
                torch.manual_seed(seed)
            elif step == "draw":
                y = y + torch.rand(4)
            elif step == "like":
                y = y + torch.rand_like(y)
            elif step == "own":
                self.generator.manual_seed(seed)
                y = y * torch.rand(4, generator=self.generator)
            elif step == "made":
                y = y * torch.rand(4, generator=torch.Generator().manual_seed(seed))
            else:
                with torch.random.fork_rng():
                    if seed:
                        torch.manual_seed(seed)
                    y = y - torch.rand(4)
        return y


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 25 else pytest.mark.long) for s in range(300)])
def test_random_orders_of_seeds_and_draws(seed: int) -> None:
    """Where PyTorch gives the same in two runs, so does the exported model, unless a warning says that it does not."""
    model, x = Steps(seed), torch.randn(3, 4)
    program, messages = exported(model, x)
    for inputs in (x, torch.randn(5, 4)):
        torch.seed()
        first = model(inputs)
        torch.seed()
        if "draws other numbers" not in messages and torch.equal(first, model(inputs)):
            torch.testing.assert_close(program(inputs)[0], first)
